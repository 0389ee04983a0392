"""Tokens a second of "auto" and of fixed numbers of drafts, as the load goes from 1 stream to 32.

    python benchmarks/speculation_load.py [--base-ms 36] [--token-ms 3.9] [--tokens 128]

The engine core serves on a virtual clock, so that all settings have the same luck and no other work
on the machine counts: a step takes a + b · tokens of its program, padding included. By default they
are such that four tokens take 1.3 times as long as one and eight 1.7 times, about as of
SmolLM2-135M in float32 on two CPU cores. Each phase keeps so many streams busy, with text of which
drafts are often right (copies, tables), seldom (chats), or both in turn. A draft that is right for
one setting is right for all. One engine of each setting goes through all phases, so "auto" has to
learn each of them anew, and pays for it.
"""

from __future__ import annotations

import argparse
import dataclasses

from table import print_table

from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.settings.speculative import AUTO_LENGTHS
from jaxserve.core.steps.buckets import Buckets
from jaxserve.simulator.acceptance import DraftAcceptance, Verified
from jaxserve.simulator.simulation import Arrival, Simulation
from jaxserve.simulator.step_times import LinearTimes

STREAMS = (1, 2, 4, 8, 16, 32)
KINDS = {"easy": (0.85,), "hard": (0.3,), "both": (0.85, 0.3)}
"""Probabilities that a draft is right, of the requests in turn."""
PROMPT_TOKENS, PREFILL_TOKENS = 32, 128


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base-ms", type=float, default=36.0, help="of a step without tokens")
    parser.add_argument("--token-ms", type=float, default=3.9, help="of each token of a step")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, on average")
    parser.add_argument("--requests", type=int, default=4, help="of each stream in a phase")
    options = parser.parse_args()
    times = LinearTimes(options.base_ms / 1e3, options.token_ms / 1e3)
    settings = (*AUTO_LENGTHS, "auto")
    speeds = {
        setting: tokens_per_s(setting, times, options.tokens, options.requests)
        for setting in settings
    }
    rows = []
    for phase, auto in speeds["auto"].items():
        fixed = {length: speeds[length][phase] for length in AUTO_LENGTHS}
        best = max(fixed, key=fixed.__getitem__)
        rows.append((*phase, *fixed.values(), auto, best, auto / fixed[best]))
    print_table(
        f"tokens/s, answers of {options.tokens} tokens, {options.requests} of each stream",
        ("drafts", "streams", *map(str, AUTO_LENGTHS), "auto", "best fixed", "auto / best"),
        rows,
    )


def tokens_per_s(
    setting: int | str, times: LinearTimes, num_tokens: int, requests: int
) -> dict[tuple[str, int], float]:
    """The speed in each phase, by its kind and number of streams."""
    most = STREAMS[-1]
    drafts = {"method": "ngram", "num_speculative_tokens": setting} if setting else None
    widest = AUTO_LENGTHS[-1] if setting == "auto" else setting
    config = EngineConfig(
        max_num_seqs=most,
        max_num_batched_tokens=most * (1 + widest) + PREFILL_TOKENS,
        max_model_len=PROMPT_TOKENS + 2 * num_tokens,
        page_size=16,
        scheduler="sarathi",
        enable_prefix_caching=False,
        speculative_config=drafts,
    )
    buckets = Buckets.from_config(
        most, config.max_num_batched_tokens, draft_lengths=config.draft_lengths
    )
    pages = 1 + 2 * most * -(-config.max_model_len // config.page_size)
    acceptance = ByRequest()
    simulation = Simulation(config, buckets, pages, times, acceptance=acceptance)
    # From half to one and a half times as long: requests begin and end one by one.
    lengths = [num_tokens // 2 + 37 * n % num_tokens for n in range(most * requests)]
    found = {}
    for kind, chances in KINDS.items():
        for streams in STREAMS:
            begin_us, begun = simulation.clock.now(), 0
            while begun < streams * requests or simulation.core.has_work:
                while begun < streams * requests and len(simulation.core.requests) < streams:
                    prompt = acceptance.prompt(chances[begun % len(chances)])
                    params = SamplingParams(
                        temperature=0, max_tokens=lengths[begun], ignore_eos=True
                    )
                    simulation.add(Arrival(simulation.clock.now(), prompt, params))
                    begun += 1
                simulation.core.step()
            elapsed_s = (simulation.clock.now() - begin_us) / 1e6
            found[kind, streams] = sum(lengths[: streams * requests]) / elapsed_s
    return found


if __name__ == "__main__":
    main()
