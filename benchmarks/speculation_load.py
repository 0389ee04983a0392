"""Tokens a second of "auto" and of fixed numbers of drafts, as the load goes from 1 stream to 32.

    python benchmarks/speculation_load.py [--base-ms 36] [--token-ms 3.9] [--tokens 128]
    python benchmarks/speculation_load.py --engine [--model MODEL] [--streams 1 4 32] [--least 8]

By default the engine core serves on a virtual clock, so that all settings have the same luck and no
other work on the machine counts: a step takes a + b · tokens of its program, padding included. They
are such that four tokens take 1.3 times as long as one and eight 1.7 times, about as of
SmolLM2-135M in float32 on two CPU cores. With --engine a model serves, with prompt lookup, and
times are measured; it has to have the machine to itself.

Each phase keeps so many streams busy, with text of which drafts are often right (copies, tables),
seldom (chats), or both in turn. A draft that is right for one setting is right for all. "auto" goes
through all phases in their order, so it has to learn each of them anew, and pays for it. With
--engine the settings take turns in each phase, so that a machine that slows down slows all.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

from speculation import CHATS, prompt_of
from table import print_table

from jaxserve import LLM
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.settings.speculative import AUTO_LENGTHS
from jaxserve.core.steps.buckets import Buckets
from jaxserve.scheduler.drafts import FixedDraftLength
from jaxserve.simulator.acceptance import DraftAcceptance, Verified
from jaxserve.simulator.simulation import Arrival, Simulation
from jaxserve.simulator.step_times import LinearTimes

STREAMS = (1, 2, 4, 8, 16, 32)
CHANCES = {"easy": 0.85, "hard": 0.3}
"""Probabilities that a draft is right on the virtual clock."""
TEXTS = {"easy": ("copy a text", "continue a table"), "hard": ("questions", *CHATS)}
"""The prompts of an engine, by their names in speculation.py."""
KINDS = {"easy": ("easy",), "hard": ("hard",), "both": ("easy", "hard")}
"""Of the requests of a phase in turn."""
PROMPT_TOKENS, PREFILL_TOKENS = 32, 128
SETTINGS = (*AUTO_LENGTHS, "auto")
Setting = int | str


class Server(Protocol):
    """What serves with one setting."""

    def now_s(self) -> float:
        """The time in seconds."""

    def add(self, kind: str, num_tokens: int) -> None:
        """Adds a request of this kind for so many tokens."""

    def step(self) -> None:
        """Makes a step."""

    @property
    def num_open(self) -> int:
        """Unfinished requests."""

    @property
    def has_work(self) -> bool:
        """Whether there are any, or a step is not yet read."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-ms", type=float, default=36.0, help="of a step without tokens")
    parser.add_argument("--token-ms", type=float, default=3.9, help="of each token of a step")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, on average")
    parser.add_argument("--requests", type=int, default=4, help="of each stream in a phase")
    parser.add_argument("--least", type=int, default=0, help="requests of a phase at least")
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--engine", action="store_true", help="serve a model, and measure times")
    parser.add_argument("--model", help="of the engine; by default the default model")
    options = parser.parse_args()
    times = LinearTimes(options.base_ms / 1e3, options.token_ms / 1e3)
    most, tokens = max(options.streams), options.tokens
    # From half to one and a half times as long: requests begin and end one by one.
    count = max(most * options.requests, options.least)
    lengths = [tokens // 2 + 37 * n % tokens for n in range(count)]
    servers: dict[Setting, Server]
    with contextlib.ExitStack() as stack:
        if options.engine:
            servers = stack.enter_context(engines(options.model, most, tokens))
        else:
            servers = {
                setting: VirtualClock.of(setting, times, most, tokens) for setting in SETTINGS
            }
        rows = []
        for kind, streams in itertools.product(options.kinds, options.streams):
            own = lengths[: max(streams * options.requests, options.least)]
            speeds = {
                setting: tokens_per_s(server, KINDS[kind], streams, own)
                for setting, server in servers.items()
            }
            auto = speeds.pop("auto")
            best = max(speeds, key=speeds.__getitem__)
            rows.append((kind, streams, *speeds.values(), auto, best, auto / speeds[best]))
            print(f"{kind}, {streams} streams: {rows[-1][-1]:.2f}", flush=True)
    print_table(
        f"tokens/s, answers of {tokens} tokens, {options.requests} of each stream, "
        f"{options.least} or more",
        ("drafts", "streams", *map(str, AUTO_LENGTHS), "auto", "best fixed", "auto / best"),
        rows,
    )


def tokens_per_s(
    server: Server, kinds: SequenceOf[str], streams: int, lengths: SequenceOf[int]
) -> float:
    """The speed of a phase of requests of these lengths."""
    begin_s, begun = server.now_s(), 0
    while begun < len(lengths) or server.has_work:
        while begun < len(lengths) and server.num_open < streams:
            server.add(kinds[begun % len(kinds)], lengths[begun])
            begun += 1
        server.step()
    return sum(lengths) / (server.now_s() - begin_s)


@dataclasses.dataclass
class ByRequest:
    """As Acceptance, with the probability that a request's first prompt token stands for."""

    models: list[DraftAcceptance] = dataclasses.field(default_factory=list)

    def prompt(self, chance: float) -> list[int]:
        """A prompt like no other, of a request whose drafts are right so often."""
        self.models.append(DraftAcceptance((chance,)))
        return [len(self.models) - 1] * PROMPT_TOKENS

    def verified(self, seq: Sequence, output_index: int, num_drafts: int) -> Verified:
        return self.models[seq.prompt_token_ids[0]].verified(seq, output_index, num_drafts)


@dataclasses.dataclass
class VirtualClock:
    """The engine core without devices, and which drafts are right."""

    simulation: Simulation
    acceptance: ByRequest

    @classmethod
    def of(cls, setting: Setting, times: LinearTimes, most: int, num_tokens: int) -> VirtualClock:
        """With one setting, for so many streams at most."""
        config = EngineConfig(
            max_model_len=PROMPT_TOKENS + 2 * num_tokens,
            page_size=16,
            **common(setting, most),
        )
        buckets = Buckets.from_config(
            most, config.max_num_batched_tokens, draft_lengths=config.draft_lengths
        )
        pages = 1 + 2 * most * -(-config.max_model_len // config.page_size)
        acceptance = ByRequest()
        return cls(Simulation(config, buckets, pages, times, acceptance=acceptance), acceptance)

    def now_s(self) -> float:
        return self.simulation.clock.now() / 1e6

    def add(self, kind: str, num_tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        prompt = self.acceptance.prompt(CHANCES[kind])
        self.simulation.add(Arrival(self.simulation.clock.now(), prompt, params))

    def step(self) -> None:
        self.simulation.core.step()

    @property
    def num_open(self) -> int:
        return len(self.simulation.core.requests)

    @property
    def has_work(self) -> bool:
        return self.simulation.core.has_work


def common(setting: Setting, most: int) -> dict[str, Any]:
    """Settings of the engine core, on either clock."""
    drafts = {"method": "ngram", "num_speculative_tokens": setting} if setting else None
    widest = AUTO_LENGTHS[-1] if setting == "auto" else setting
    return {
        "max_num_seqs": most,
        "max_num_batched_tokens": most * (1 + widest) + PREFILL_TOKENS,
        "scheduler": "sarathi",
        "enable_prefix_caching": False,
        "speculative_config": drafts,
    }


class OneLength(FixedDraftLength):
    """As many drafts for every sequence, of an engine that has programs for more."""

    def __init__(self, length: int) -> None:
        self._length = length

    def of(self, seq: Sequence) -> int:
        return min(self._length, seq.num_speculative_tokens)


@dataclasses.dataclass
class OfEngine:
    """An engine with one setting: that of `drafts`, or its own."""

    llm: LLM
    drafts: FixedDraftLength | None = None
    added: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        """What an engine has learnt stays with its own setting."""
        scheduler = self.llm.engine.scheduler
        own = None if self.drafts else scheduler.step_time
        self._state = self.drafts or scheduler._drafts, own

    def now_s(self) -> float:
        return time.perf_counter()

    def add(self, kind: str, num_tokens: int) -> None:
        number, names = next(self.added), TEXTS[kind]
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        prompt = prompt_of(self.llm, names[number % len(names)])
        self.llm.engine.add(f"{id(self)}-{number}", prompt, params)

    def step(self) -> None:
        scheduler = self.llm.engine.scheduler
        scheduler._drafts, scheduler.step_time = self._state
        self.llm.engine.step()

    @property
    def num_open(self) -> int:
        return len(self.llm.engine._requests)

    @property
    def has_work(self) -> bool:
        return self.llm.engine.has_work


@contextlib.contextmanager
def engines(model: str | None, most: int, num_tokens: int) -> Iterator[dict[Setting, Server]]:
    """An engine without speculation, and one that has the programs of all other settings."""
    settings = {} if model is None else {"model": model}
    settings["max_model_len"] = 256 + 2 * num_tokens
    with (
        LLM(**settings, **common(0, most)) as plain,
        LLM(**settings, **common("auto", most)) as drafting,
    ):
        servers: dict[Setting, Server] = {0: OfEngine(plain)}
        for length in AUTO_LENGTHS[1:]:
            servers[length] = OfEngine(drafting, OneLength(length))
        servers["auto"] = OfEngine(drafting)
        yield servers


if __name__ == "__main__":
    main()
