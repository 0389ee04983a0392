"""Time to first token of short requests while very long prompts prefill, on a virtual clock.

First come, first served makes the short ones wait until a long prompt is computed: a convoy. With
relative slack (LARS, of Medha, Agrawal et al. 2024) they share its steps, and its chunks shrink as
its context grows, so that step times stay even. The first row has the short requests alone: the
limit. A step takes a + b · tokens + c · pairs, the last from Medha's 250 ms for a chunk of 512
tokens after a million, of Llama-3-8B on 8 H100s.
"""

from __future__ import annotations

import argparse

from simulated import Run, linear_times, simulate
from table import print_table
from workloads import Job, conversation

from jaxserve.core.steps.buckets import Buckets
from jaxserve.kv.pages import PagePool
from jaxserve.metrics.statistics import percentile
from jaxserve.scheduler.scheduler import SchedulerConfig

BASE_US, PER_TOKEN_US, PER_PAIR_US = 5_000, 20, 0.48e-3
TARGET_US = 50_000
ROWS = 64
BUDGET = ROWS + 2048
FIXED_BUDGET = ROWS + 512


def serve(jobs: list[Job], policy: str, budget: int) -> Run:
    buckets = Buckets.from_config(ROWS, budget)
    config = SchedulerConfig(
        policy=policy,
        max_num_seqs=ROWS,
        max_num_batched_tokens=budget,
        max_prefill_tokens=buckets.max_prefill_tokens,
        max_model_len=2**21,
        target_step_us=TARGET_US if policy == "medha" else None,
        buckets=buckets,
    )
    times = linear_times(BASE_US, PER_TOKEN_US, PER_PAIR_US)
    return simulate(jobs, config, PagePool(60_001, 64), times, buckets=buckets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=2.0, help="short requests per second")
    parser.add_argument("--seconds", type=int, default=300, help="how long they keep coming")
    parser.add_argument("--long-tokens", type=int, nargs="+", default=[262_144, 524_288])
    args = parser.parse_args()
    short = conversation(round(args.rate * args.seconds), args.rate, seed=0)
    gap_us = args.seconds * 1_000_000 // (len(args.long_tokens) + 1)
    long = [Job(i * gap_us, tokens, 16) for i, tokens in enumerate(args.long_tokens)]
    runs = {
        "medha, short alone": serve(short, "medha", BUDGET),
        "sarathi, first come": serve(short + long, "sarathi", FIXED_BUDGET),
        "medha, relative slack": serve(short + long, "medha", BUDGET),
    }

    def first_token_us(run: Run) -> list[int]:
        return run.first_token_us[: len(short)]

    convoy_us = percentile(first_token_us(runs["sarathi, first come"]), 99)
    rows = []
    for name, run in runs.items():
        short_us = first_token_us(run)
        long_us = run.first_token_us[len(short) :]
        rows.append(
            (
                name,
                percentile(short_us, 50) / 1e6,
                percentile(short_us, 99) / 1e6,
                convoy_us / percentile(short_us, 99),
                max(step.end_us - step.start_us for step in run.steps) / 1e3,
                max(long_us) / 1e6 if long_us else None,
                run.output_tokens_per_s,
            )
        )
    lengths = " and ".join(f"{tokens:,}" for tokens in args.long_tokens)
    print_table(
        f"{len(short)} short requests, {args.rate} a second, and prompts of {lengths} tokens; "
        f"target {TARGET_US / 1e3:.0f} ms a step",
        (
            "scheduler",
            "short P50 TTFT s",
            "short P99 TTFT s",
            "first come / this",
            "longest step ms",
            "long TTFT s, most",
            "tokens/s",
        ),
        rows,
    )


if __name__ == "__main__":
    main()
