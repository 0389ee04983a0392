"""Model iterations for a backlog of requests, with static and continuous batching.

Every policy serves the same requests with the same number of rows. The count is compared with
arithmetic: a static batch lasts as long as its longest member, and no policy needs fewer iterations
than tokens over rows.
"""

from __future__ import annotations

import dataclasses

from simulated import linear_times, simulate
from table import print_table
from workloads import Job, backlog, from_arguments

from jaxserve.core.steps.buckets import Buckets
from jaxserve.kv.pages import PagePool
from jaxserve.scheduler.policies import POLICIES
from jaxserve.scheduler.scheduler import SchedulerConfig

ROWS = 32
PROMPT_TOKENS = 8


def static_iterations(jobs: list[Job], rows: int) -> int:
    """Sum over consecutive batches of the longest output in the batch."""
    lengths = [job.output_tokens for job in jobs]
    return sum(max(lengths[i : i + rows]) for i in range(0, len(lengths), rows))


def least_iterations(jobs: list[Job], rows: int) -> int:
    """Tokens to generate over rows, rounded up."""
    return -(-sum(job.output_tokens for job in jobs) // rows)


def main() -> None:
    # Short prompts and a wide budget: a whole batch prefills in the iteration that gives its
    # first tokens, so that iterations count tokens and nothing else.
    jobs = [
        dataclasses.replace(job, prompt_tokens=PROMPT_TOKENS, max_tokens=job.output_tokens)
        for job in backlog(from_arguments(__doc__, count=512, rate_per_s=1))
    ]
    iterations = {}
    budget = ROWS * (PROMPT_TOKENS + 1)
    buckets = Buckets.from_config(ROWS, budget)
    for policy in POLICIES:
        config = SchedulerConfig(
            policy=policy,
            max_num_seqs=ROWS,
            max_num_batched_tokens=budget,
            max_prefill_tokens=ROWS * PROMPT_TOKENS,
            max_model_len=2048,
            target_step_us=1 if POLICIES[policy].chunk == "timed" else None,
            buckets=buckets,
        )
        run = simulate(jobs, config, PagePool(ROWS * 128 + 1, 16), linear_times(1, 0))
        iterations[policy] = len(run.steps)
    limit = {policy: least_iterations(jobs, ROWS) for policy in POLICIES}
    limit["static"] = static_iterations(jobs, ROWS)
    print_table(
        f"{len(jobs)} requests, {ROWS} rows, iterations",
        ("scheduler", "iterations", "arithmetic", "static / this"),
        [(p, n, limit[p], iterations["static"] / n) for p, n in iterations.items()],
    )


if __name__ == "__main__":
    main()
