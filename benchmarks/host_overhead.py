"""What the host spends on a step: scheduling, packing and logging, beside the step itself.

Runs the real engine on SmolLM2 with 64 sequences decoding, and reads the event log. The KV manager,
with a tier in the host's memory beside the device's, is timed call by call; its time is part of
scheduling, and of collecting a step's tokens.

    python benchmarks/host_overhead.py
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np
from table import print_table

from jaxserve import LLM, SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.engine.events import Dispatched
from jaxserve.kv.manager import KVManager

POLLED = ("poll", "operations")
ASKED = (
    "match",
    "fits",
    "take",
    "extend",
    "written",
    "release",
    "forsake",
    "prefers_swap",
    "evict",
)


class Stopwatch:
    """Times the calls that an engine makes of its KV manager."""

    def __init__(self, kv: KVManager) -> None:
        self.ns = 0
        self.num_asked = 0
        """Calls that a step only makes when it has something for the manager to do."""
        for name in POLLED + ASKED:
            setattr(kv, name, self._timed(getattr(kv, name), asked=name in ASKED))

    def reset(self) -> None:
        self.ns = self.num_asked = 0

    def _timed(self, call: Callable, asked: bool) -> Callable:
        @functools.wraps(call)
        def timed(*arguments, **settings):
            begin = time.perf_counter_ns()
            result = call(*arguments, **settings)
            self.ns += time.perf_counter_ns() - begin
            self.num_asked += asked
            return result

        return timed


def manager_us(engine: Engine, sequences: int) -> tuple[list[float], list[float]]:
    """Microseconds of the manager in each step with all sequences decoding, until the engine has
    nothing left to do: steps with nothing for it to do, and the others."""
    watch = Stopwatch(engine.kv)
    idle, busy = [], []
    while engine.has_work:
        watch.reset()
        engine.step()
        last = engine.log.records
        step = next((r for r in reversed(last) if isinstance(r, Dispatched)), None)
        if step is not None and step.decode_rows == sequences:
            (busy if watch.num_asked else idle).append(watch.ns / 1000)
    return idle, busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    # Keeping the events costs what a trace file would.
    with LLM(
        max_num_seqs=arguments.sequences, host_kv_bytes=64 << 20, trace_file="/dev/null"
    ) as llm:
        engine = llm.engine
        params = SamplingParams(temperature=0, max_tokens=arguments.new_tokens, ignore_eos=True)
        # Of different lengths, so that some steps begin pages, and others none.
        for index, length in enumerate(rng.integers(16, 80, arguments.sequences)):
            engine.add(str(index), rng.integers(1000, 49000, int(length)).tolist(), params)
        idle, busy = manager_us(engine, arguments.sequences)
        steps = [record for record in engine.log.records if isinstance(record, Dispatched)]
    full = [step for step in steps if step.decode_rows == arguments.sequences]
    between = [after.time_us - before.time_us for before, after in itertools.pairwise(full)]
    step_us = statistics.median(between)
    rows = []
    for name, values in (
        ("KV manager, nothing to do", idle),
        ("KV manager, pages begin or end", busy),
        ("schedule", [step.schedule_us for step in full]),
        ("pack", [step.pack_us for step in full]),
        ("schedule and pack", [step.schedule_us + step.pack_us for step in full]),
        ("step", between),
    ):
        median = statistics.median(values)
        rows.append((name, len(values), median, max(values), 100 * median / step_us))
    print_table(
        f"Host time of a step with {arguments.sequences} sequences decoding",
        ("part", "steps", "median us", "max us", "% of a step"),
        rows,
    )


if __name__ == "__main__":
    main()
