"""What the host spends on a step: scheduling, packing and logging, beside the step itself.

Runs the real engine on SmolLM2 with 64 sequences decoding, and reads the event log.

    python benchmarks/host_overhead.py
"""

from __future__ import annotations

import argparse
import itertools
import statistics

import numpy as np
from table import print_table

from jaxserve import LLM, SamplingParams
from jaxserve.engine.events import Dispatched


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    # Keeping the events costs what a trace file would.
    with LLM(max_num_seqs=arguments.sequences, trace_file="/dev/null") as llm:
        prompts = [rng.integers(1000, 49000, 32).tolist() for _ in range(arguments.sequences)]
        params = SamplingParams(temperature=0, max_tokens=arguments.new_tokens, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
        steps = [record for record in llm.engine.log.records if isinstance(record, Dispatched)]
    full = [step for step in steps if step.decode_rows == arguments.sequences]
    between = [after.time_us - before.time_us for before, after in itertools.pairwise(full)]
    step_us = statistics.median(between)
    rows = []
    for name, values in (
        ("schedule", [step.schedule_us for step in full]),
        ("pack", [step.pack_us for step in full]),
        ("both", [step.schedule_us + step.pack_us for step in full]),
    ):
        median = statistics.median(values)
        rows.append((name, median, max(values), 100 * median / step_us))
    rows.append(("step", step_us, max(between), 100.0))
    print_table(
        f"Host time of a step with {arguments.sequences} sequences decoding ({len(full)} steps)",
        ("part", "median us", "max us", "% of a step"),
        rows,
    )


if __name__ == "__main__":
    main()
