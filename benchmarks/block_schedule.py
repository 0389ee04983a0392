"""Weights read from disk for each step by itself, and for a block of steps: bytes, and time.

    python benchmarks/block_schedule.py [MODEL] [--dtype float32] [--rows 2] [--steps 8]

The same sequences, `rows` to a step, answer greedily: row by row, in batches one after another; in
blocks of `steps` steps; and in one large step of all of them. The tokens must be the same. Of each
it prints the bytes of weights read for an output token, the output tokens a second, and the time
that the policy's model (offline/offload_policy.py) gives them, from rates that are measured first.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from table import print_table

from jaxserve import LLM, SamplingParams
from jaxserve.cli.planning import step_rates
from jaxserve.models.loading.fetch import default_model_path
from jaxserve.offline.offload_policy import (
    TIERS,
    Lengths,
    MemoryCapacity,
    ModelBytes,
    PolicyRates,
    Problem,
)
from jaxserve.runtime.hardware import link_rates
from jaxserve.runtime.startup.loading import layer_file

MIB = 1 << 20
PROMPT = 32


class Found(NamedTuple):
    token_ids: list[tuple[int, ...]]
    num_bytes: int
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, default=default_model_path())
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    rows, steps = options.rows, options.steps
    every = rows * steps
    cases = {"row by row": (rows, 1), f"block of {steps}": (rows, steps), "one step": (every, 1)}
    with load(options, every, 1) as llm:
        problem = measured(llm, options, sorted({rows, every}))
    found = {}
    for name, case in cases.items():
        with load(options, *case) as llm:
            found[name] = run(llm, every, options.tokens)
    report(options, cases, found, problem)


def load(options: argparse.Namespace, rows: int, steps: int) -> LLM:
    settings: dict[str, Any] = {
        "dtype": options.dtype,
        "weights_on": "disk",
        "steps_per_weight_read": steps,
        "max_num_seqs": rows * steps,
        "max_num_batched_tokens": rows * (1 + PROMPT),
        "max_model_len": 256,
        "page_size": 16,
        "scheduler": "static",
    }
    return LLM(options.model, **settings)


def measured(llm: LLM, options: argparse.Namespace, sizes: list[int]) -> Problem:
    """The model of this machine: all layers on disk."""
    plan = llm.plan()
    placement = plan.shapes.placement
    steps = step_rates.measure(llm.engine, sizes, PROMPT + options.tokens // 2)
    links = link_rates.measure(plan.device, layer_file(plan.checkpoint, plan.shapes).path.parent)
    print(steps, links)
    return Problem(
        ModelBytes(
            len(placement.layer_bytes),
            max(placement.layer_bytes),
            placement.outside_bytes,
            plan.memory.page_bytes // plan.config.page_size,
            plan.shapes.model.hidden_size * plan.shapes.dtype.itemsize,
        ),
        PolicyRates(**steps._asdict(), **links._asdict()),
        Lengths.of(PROMPT * sizes[-1], [options.tokens] * sizes[-1]),
        MemoryCapacity(0, 0, 0),
        prefill_tokens=plan.shapes.buckets.prefill_tokens,
    )


def run(llm: LLM, count: int, tokens: int) -> Found:
    """All sequences twice, the first time to warm up, with nothing cached."""
    rng = np.random.RandomState(0)
    for seed in range(2):
        prompts = rng.randint(100, 1000, (count, PROMPT)).tolist()
        params = SamplingParams(
            temperature=0, max_tokens=2 if not seed else tokens, ignore_eos=True
        )
        reads = llm.engine.counters.weight_reads
        num_bytes, begin = reads.num_bytes, time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
    token_ids = [output.outputs[0].token_ids for output in outputs]
    return Found(token_ids, reads.num_bytes - num_bytes, seconds)


def report(
    options: argparse.Namespace,
    cases: dict[str, tuple[int, int]],
    found: dict[str, Found],
    problem: Problem,
) -> None:
    on_disk = {("weights", tier): float(tier == "disk") for tier in TIERS}
    on_disk |= {(k, t): float(t == "device") for k in ("kv", "activations") for t in TIERS}
    first = next(iter(found.values()))
    total = options.rows * options.steps * options.tokens
    rows = []
    for name, one in found.items():
        modelled = problem.seconds(*cases[name], on_disk)
        rows.append(
            (
                name,
                one.num_bytes / total / MIB,
                one.num_bytes / first.num_bytes,
                total / one.seconds,
                first.seconds / one.seconds,
                1 / modelled,
                modelled * total / one.seconds,
                "yes" if one.token_ids == first.token_ids else "NO",
            )
        )
    columns = ("schedule", "MiB a token", "of row by row", "tokens/s", "times row by row")
    columns += ("modelled tokens/s", "modelled time / measured", "same tokens")
    title = (
        f"{options.model.name}, {options.dtype}: {options.rows * options.steps} sequences, "
        f"{options.rows} to a step"
    )
    print_table(title, columns, rows)


if __name__ == "__main__":
    main()
