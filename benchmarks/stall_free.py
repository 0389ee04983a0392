"""Time between tokens while prompts keep arriving, on a virtual clock.

A step takes a + b · tokens, fitted to Sarathi-Serve's published measurements of Yi-34B on two
A100s: a batch of 4 tokens takes 68.1 ms, one of 1,024 takes 217.2 ms. A stall-free schedule keeps
every gap between two tokens within a + b · τ; one that prioritizes prompts does not.

Sarathi-Serve and SplitFuse are both stall-free. They differ in steps after which prompts still wait
although a row is free: SplitFuse fills the prefill tokens of each exactly, Sarathi does not
schedule a chunk below its minimum.
"""

from __future__ import annotations

from simulated import linear_times, simulate
from table import print_table
from workloads import from_arguments

from jaxserve.core.steps.buckets import Buckets
from jaxserve.kv.pages import PagePool
from jaxserve.metrics.statistics import percentile
from jaxserve.scheduler.policies import POLICIES
from jaxserve.scheduler.scheduler import SchedulerConfig

BASE_US, PER_TOKEN_US = 67_500, 146
ROWS = 128
BUDGET = 640


def main() -> None:
    jobs = from_arguments(__doc__, count=600, rate_per_s=1.5)
    rows = []
    runs = {}
    bound_us = BASE_US + PER_TOKEN_US * BUDGET
    buckets = Buckets.from_config(ROWS, BUDGET)
    for policy in POLICIES:
        config = SchedulerConfig(
            policy=policy,
            max_num_seqs=ROWS,
            max_num_batched_tokens=BUDGET,
            max_prefill_tokens=BUDGET - ROWS,
            max_model_len=8192,
            target_step_us=bound_us if POLICIES[policy].chunk == "timed" else None,
            buckets=buckets,
        )
        pool = PagePool(20_001, 16)
        runs[policy] = simulate(jobs, config, pool, linear_times(BASE_US, PER_TOKEN_US))
    best = percentile(runs["sarathi"].between_tokens_us, 99)
    for policy, run in runs.items():
        gaps = run.between_tokens_us
        short = [s for s in run.steps if s.num_waiting and s.num_running < ROWS]
        filled = [step.num_prefill_tokens == BUDGET - ROWS for step in short]
        rows.append(
            (
                policy,
                max(gaps) / 1e3,
                percentile(gaps, 99) / 1e3,
                percentile(gaps, 99) / best,
                percentile(run.first_token_us, 50) / 1e6,
                percentile(run.first_token_us, 99) / 1e6,
                run.output_tokens_per_s,
                len(short),
                100 * sum(filled) / len(filled) if filled else None,
            )
        )
    print_table(
        f"{len(jobs)} requests, {BUDGET} tokens a step: a + b · τ = {bound_us / 1e3:.1f} ms",
        (
            "scheduler",
            "max gap ms",
            "P99 gap ms",
            "P99 / sarathi",
            "P50 TTFT s",
            "P99 TTFT s",
            "tokens/s",
            "steps with prompts left",
            "filled exactly %",
        ),
        rows,
    )


if __name__ == "__main__":
    main()
