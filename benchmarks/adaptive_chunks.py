"""Time between tokens of running requests while a long prompt prefills, fixed and adaptive chunks.

Runs the real engine on SmolLM2. Because of attention, a chunk of fixed size costs more with a
longer context; an adaptive one shrinks so that its step stays within a target (Mnemosyne, published
as Medha, Agrawal et al. 2024). Both engines first serve a shorter prompt, to fit the step time
model of the adaptive one.

    python benchmarks/adaptive_chunks.py
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from itertools import pairwise

import numpy as np
from table import print_table

from jaxserve import LLM, SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.metrics.statistics import percentile

DECODES = 4
CHUNK = 512


@dataclasses.dataclass(frozen=True)
class Prefill:
    """A long prompt beside running requests: seconds and tokens of it, a step each, and every
    time between two tokens of the running ones, in milliseconds."""

    seconds: float
    chunks: list[int]
    gaps_ms: list[float]


def answering(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def prefill(engine: Engine, rng: np.random.Generator, num_tokens: int) -> Prefill:
    """Adds a prompt beside requests that decode, and steps until its first token."""

    def add(name: str, length: int, answer: int):
        prompt = rng.integers(1000, 49000, length).tolist()
        return engine.add(f"{name}-{num_tokens}", prompt, answering(answer))

    running = [add(f"running {index}", 16, 2000) for index in range(DECODES)]
    while not all(request.sequence_outputs[0].seq.num_output > 1 for request in running):
        engine.step()
    begin = time.monotonic()
    long = add("long", num_tokens, 1)
    seq, chunks, times = long.sequence_outputs[0].seq, [0], {r.request_id: [begin] for r in running}
    while not long.finished:
        for request in engine.step():
            if request.request_id in times:
                times[request.request_id].append(time.monotonic())
        chunks.append(seq.num_computed)
    end = time.monotonic()
    for request in running:
        engine.abort(request.request_id)
    while engine.has_work:
        engine.step()
    return Prefill(
        end - begin,
        [after - before for before, after in pairwise(chunks) if after > before],
        [1e3 * (after - before) for ready in times.values() for before, after in pairwise(ready)],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=6144, help="length of the long prompt")
    parser.add_argument("--target-ms", type=int, default=1000, help="of a step")
    args = parser.parse_args()
    runs: dict[str, Prefill] = {}
    for name, settings in (
        ("fixed", {"scheduler": "sarathi"}),
        ("adaptive", {"scheduler": "medha", "target_step_us": 1000 * args.target_ms}),
    ):
        rng = np.random.default_rng(0)
        with LLM(max_num_seqs=8, max_num_batched_tokens=8 + CHUNK, **settings) as llm:
            prefill(llm.engine, rng, 2 * CHUNK)
            runs[name] = prefill(llm.engine, rng, args.tokens)
    fixed_ms = max(runs["fixed"].gaps_ms)
    print_table(
        f"{DECODES} requests decode while a prompt of {args.tokens:,} tokens prefills; adaptive "
        f"chunks are to keep a step within {args.target_ms:,} ms",
        (
            "chunks",
            "steps",
            "largest chunk",
            "smallest chunk",
            "P50 gap ms",
            "P99 gap ms",
            "max gap ms",
            "fixed / this, max",
            "long TTFT s",
        ),
        [
            (
                name,
                len(run.chunks),
                max(run.chunks),
                min(run.chunks[:-1]),
                percentile(run.gaps_ms, 50),
                percentile(run.gaps_ms, 99),
                max(run.gaps_ms),
                fixed_ms / max(run.gaps_ms),
                run.seconds,
            )
            for name, run in runs.items()
        ],
    )


if __name__ == "__main__":
    main()
