"""Time from a snapshot to the next token of every request, with saved KV and with recomputed KV.

Runs the real engine on SmolLM2. Requests with prompts of so many tokens are saved while generating,
and aborted; then they are restored, once from a snapshot with KV and once from one without. Process
startup is excluded: it is the same for both.

    python benchmarks/resume.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from table import print_table

from jaxserve import LLM, SamplingParams
from jaxserve.core.events import Dispatched
from jaxserve.engine.request import Request

SHAPES = ((1, 256), (1, 1024), (4, 512), (16, 128))
"""Requests, and tokens of each prompt."""
BEFORE, AFTER = 4, 8
"""Tokens that each has when it is written down, and how many more it may have."""


def step_until(llm: LLM, requests: list[Request], num_tokens: int) -> None:
    """Until each request has so many output tokens."""
    sequences = [request.sequence_outputs[0].seq for request in requests]
    while any(len(seq.output_token_ids) < num_tokens for seq in sequences):
        llm.engine.step()


def forget(llm: LLM) -> None:
    """Leaves the engine as a new process would find it."""
    for request_id in list(llm.engine._requests):
        llm.abort(request_id)
    while llm.engine.has_work:
        llm.engine.step()
    llm.reset_prefix_cache()


def prefilled(llm: LLM) -> int:
    steps = (record for record in llm.engine.log.records if isinstance(record, Dispatched))
    return sum(step.prefill_tokens for step in steps)


def resume(llm: LLM, directory: Path) -> tuple[float, int]:
    """Seconds until every request has its next token, and tokens prefilled till then."""
    forget(llm)
    before = prefilled(llm)
    begin = time.perf_counter()
    requests = llm.engine.snapshots.restore(directory)
    known = max(len(request.sequence_outputs[0].seq.output_token_ids) for request in requests)
    step_until(llm, requests, known + 1)
    return time.perf_counter() - begin, prefilled(llm) - before


def measure(llm: LLM, prompts: list[list[int]], rounds: int) -> tuple[object, ...]:
    params = SamplingParams(temperature=0, max_tokens=BEFORE + AFTER, ignore_eos=True)
    wrote, seconds, computed = [], {True: [], False: []}, {}
    for number in range(rounds):
        forget(llm)
        requests = [llm.engine.add(f"{number}-{i}", p, params) for i, p in enumerate(prompts)]
        step_until(llm, requests, BEFORE)
        with tempfile.TemporaryDirectory() as scratch:
            for with_kv in (True, False):
                directory = Path(scratch) / str(with_kv)
                begin = time.perf_counter()
                llm.engine.snapshots.write(directory, with_kv)
                wrote += [time.perf_counter() - begin] * with_kv
            size = sum(file.stat().st_size for file in (Path(scratch) / "True").iterdir())
            for with_kv in (True, False):
                took, computed[with_kv] = resume(llm, Path(scratch) / str(with_kv))
                seconds[with_kv].append(took)
    kv, again = (statistics.median(seconds[with_kv]) for with_kv in (True, False))
    return (
        *(statistics.median(wrote), size / 2**20),
        *(kv, again, again / kv, computed[True], computed[False]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    draw = np.random.default_rng(0)
    rows = []
    with tempfile.NamedTemporaryFile() as trace, LLM(trace_file=trace.name) as llm:
        for count, length in SHAPES:
            prompts = draw.integers(1000, 49000, (count, length)).tolist()
            rows.append((count, length, *measure(llm, prompts, rounds)))
    columns = (
        *("requests", "prompt tokens", "to write s", "MiB"),
        *("resumed s", "recomputed s", "x faster", "tokens computed", "when recomputed"),
    )
    title = f"From restore to every request's next token, medians of {rounds} rounds"
    print_table(title, columns, rows)


if __name__ == "__main__":
    main()
