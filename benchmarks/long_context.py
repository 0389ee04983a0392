"""A prompt of a million tokens on eight devices: retrieval, cost, and how the cost grows.

A model whose answers are known by construction (benchmarks/induction_model.py) prefills a haystack
of random tokens in chunks, its KV split over the devices. It has needles at equal distances: a key
and the tokens that follow it. Every key but the first has other tokens after it at the needle
before, which must not be found, because the later ones replace them. Each key is then queried by a
prompt that is the haystack and the key; all but the first find the haystack's KV in the cache.

    python benchmarks/long_context.py
    python benchmarks/long_context.py --seq 2 --tensor 2 --stage 2 \\
        --tokens 8192 --tokens-per-row 2048 --chunk-tokens 32
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import resource
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from induction_model import VOCAB, write_induction_model
from table import print_table
from virtual_devices import make_devices

from jaxserve import LLM, SamplingParams
from jaxserve.runtime.planning.memory import MemoryPlan

ANSWER_TOKENS = 8
NEEDLES = 8
MIB = 1 << 20

_GREEDY = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)


@dataclasses.dataclass(frozen=True)
class Needle:
    """A key, where it last is in the haystack, and the tokens after it there."""

    key: int
    position: int
    answer: list[int]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What was generated for a needle's key, and how long that took, the prompt included."""

    needle: Needle
    tokens: list[int]
    cached_tokens: int
    seconds: float

    @property
    def num_right(self) -> int:
        return sum(map(int.__eq__, self.tokens, self.needle.answer))


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far the first prompt had come, and what the process had taken by then.

    cpu_seconds are those of all cores, and do not count what other processes had of them.
    """

    num_tokens: int
    seconds: float
    cpu_seconds: float
    rss_bytes: int

    @classmethod
    def at(cls, num_tokens: int) -> Progress:
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return cls(num_tokens, time.perf_counter(), time.process_time(), most)


@dataclasses.dataclass(frozen=True)
class Run:
    """A haystack that was read and asked about; `held_bytes` are the KV arrays' on each device."""

    progress: list[Progress]
    answers: list[Answer]
    memory: MemoryPlan
    held_bytes: list[int]


def haystack(num_tokens: int, hops: int) -> tuple[list[int], list[Needle]]:
    """Random tokens with NEEDLES in them, whose tokens are nowhere else."""
    rng = np.random.default_rng(0)
    length = 1 + hops * ANSWER_TOKENS
    chains, others = np.split(rng.permutation(VOCAB), [2 * NEEDLES * length])
    latest, replaced = chains.reshape(2, NEEDLES, length)
    replaced[:, 0] = latest[:, 0]
    tokens, needles = rng.choice(others, num_tokens), []
    for index, chain in enumerate(latest):
        position = (2 * index + 1) * num_tokens // (2 * NEEDLES)
        there = np.concatenate([chain, *replaced[index + 1 : index + 2]])
        tokens[position : position + len(there)] = there
        needles.append(Needle(int(chain[0]), position, chain[hops::hops].tolist()))
    return tokens.tolist(), needles


def run(
    num_tokens: int, tokens_per_row: int, chunk_tokens: int, *, seq: int, tensor: int, stage: int
) -> Run:
    """Prompts of `num_tokens` on as many devices as there are, so many to a chunk; the first is
    timed by rows."""
    hops = stage  # so that all stages have layers of the same kinds
    hay, needles = haystack(num_tokens - 1, hops)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        llm = LLM(
            write_induction_model(directory, num_tokens + ANSWER_TOKENS, hops),
            max_num_seqs=1,
            max_num_batched_tokens=1 + chunk_tokens,
            context_parallel_size=seq,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=stage,
        )
        stack.enter_context(llm)
        progress, answers = [Progress.at(0)], []
        for needle in needles:
            begin = time.perf_counter()
            request = llm.engine.add(f"{needle.key}", [*hay, needle.key], _GREEDY)
            (generation,) = request.sequence_outputs
            while llm.engine.has_work:
                llm.engine.step()
                done = generation.seq.num_computed
                if not answers and done >= progress[-1].num_tokens + tokens_per_row:
                    progress.append(Progress.at(done))
                    seconds = progress[-1].seconds - progress[0].seconds
                    print(f"{done:,} tokens, {seconds:,.0f} s", file=sys.stderr)
            output = llm.engine.output(request)
            seconds = time.perf_counter() - begin
            (completion,) = output.outputs
            tokens, cached = list(completion.token_ids), output.metrics.cached_tokens
            answers.append(Answer(needle, tokens, cached, seconds))
        held: dict[jax.Device, int] = {}
        for array in jax.tree.leaves(llm.engine._runner._state.kv):
            for shard in array.addressable_shards:
                held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
        return Run(progress, answers, llm.plan().memory, list(held.values()))


def growth(progress: list[Progress]) -> tuple[np.ndarray, np.ndarray]:
    """CPU seconds of each row, and those of the line through them that is nearest."""
    seconds = np.diff([one.cpu_seconds for one in progress])
    tokens = np.array([one.num_tokens for one in progress])
    middle = (tokens[1:] + tokens[:-1]) / 2
    return seconds, np.polyval(np.polyfit(middle, seconds, 1), middle)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--tokens-per-row", type=int, default=1 << 16)
    parser.add_argument("--chunk-tokens", type=int, default=1024)
    parser.add_argument("--seq", type=int, default=8)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--stage", type=int, default=1)
    arguments = parser.parse_args()
    degrees = {name: getattr(arguments, name) for name in ("seq", "tensor", "stage")}
    make_devices(math.prod(degrees.values()))
    done = run(arguments.tokens, arguments.tokens_per_row, arguments.chunk_tokens, **degrees)
    _print_growth(done)
    _print_answers(done)
    _print_memory(done)


def _print_growth(done: Run) -> None:
    seconds, line = growth(done.progress)
    print_table(
        f"{done.progress[-1].num_tokens:,} tokens, by {done.progress[1].num_tokens:,}",
        ("context", "seconds", "CPU seconds", "a line's", "CPU / line", "peak MiB"),
        [
            (
                now.num_tokens,
                now.seconds - before.seconds,
                float(cpu),
                float(of_line),
                float(cpu / of_line),
                now.rss_bytes // MIB,
            )
            for before, now, cpu, of_line in zip(
                done.progress, done.progress[1:], seconds, line, strict=False
            )
        ],
    )


def _print_answers(done: Run) -> None:
    print_table(
        f"\nNeedles, and the {ANSWER_TOKENS} tokens generated for each",
        ("position", "right", "cached tokens", "seconds"),
        [
            (
                answer.needle.position,
                f"{answer.num_right} of {len(answer.needle.answer)}",
                answer.cached_tokens,
                answer.seconds,
            )
            for answer in done.answers
        ],
    )


def _print_memory(done: Run) -> None:
    memory = done.memory
    of_all = memory.num_pages * memory.whole_page_bytes
    print_table(
        f"\nBytes on each of {memory.num_devices} devices",
        ("", "MiB", "all / this"),
        [
            ("KV of all devices", of_all / MIB, 1.0),
            ("KV, planned", memory.kv_bytes / MIB, of_all / memory.kv_bytes),
            ("KV, the fullest device's", max(done.held_bytes) / MIB, of_all / max(done.held_bytes)),
            ("weights", memory.weights_bytes / MIB, None),
            ("programs' scratch", memory.scratch_bytes / MIB, None),
        ],
    )


if __name__ == "__main__":
    main()
