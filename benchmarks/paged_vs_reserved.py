"""Concurrent requests in the same KV memory, reserved up front or paged.

Orca-max reserves the context limit for every request, Orca-oracle the exact length that it will
reach (which no server knows), and a paged pool only what has been written.
"""

from __future__ import annotations

import dataclasses

from simulated import Run, linear_times, simulate
from table import print_table
from workloads import Job, backlog, from_arguments

from jaxserve.kv.pages import PagePool
from jaxserve.scheduler.scheduler import SchedulerConfig

POOL_TOKENS = 65_536
PAGE_SIZE = 16
CONTEXT = 8192


def serve(policy: str, jobs: list[Job]) -> Run:
    config = SchedulerConfig(
        policy=policy,
        max_num_seqs=512,
        max_num_batched_tokens=2560,
        max_prefill_tokens=2048,
        max_model_len=CONTEXT,
    )
    return simulate(
        jobs, config, PagePool(POOL_TOKENS // PAGE_SIZE + 1, PAGE_SIZE), linear_times(1, 0)
    )


def main() -> None:
    jobs = backlog(from_arguments(__doc__, count=512, rate_per_s=1))
    known = [dataclasses.replace(job, max_tokens=job.output_tokens) for job in jobs]
    runs = {
        "orca, reserves the limit": serve("orca", jobs),
        "orca, knows the length": serve("orca", known),
        "vllm, paged": serve("vllm", jobs),
        "sarathi, paged": serve("sarathi", jobs),
    }
    base = runs["orca, reserves the limit"]
    rows = []
    for name, run in runs.items():
        used = sum(step.num_used_pages for step in run.steps) * PAGE_SIZE
        rows.append(
            (
                name,
                max(step.num_running for step in run.steps),
                run.mean_running,
                run.mean_running / base.mean_running,
                100 * sum(step.num_kv_tokens for step in run.steps) / used,
                len(run.steps),
                run.num_preemptions,
            )
        )
    print_table(
        f"{len(jobs)} requests, KV memory for {POOL_TOKENS:,} tokens, context {CONTEXT:,}",
        ("scheduler", "peak at once", "mean", "mean / first", "KV useful %", "steps", "preempted"),
        rows,
    )


if __name__ == "__main__":
    main()
