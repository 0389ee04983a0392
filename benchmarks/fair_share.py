"""Time to first token of a light tenant beside a heavy one, on a virtual clock.

The heavy tenant sends more than the engine can serve, the light one little. First come, first
served makes the light one wait behind the other's backlog; with a fair share (VTC, Sheng et al.
2024) the tenant served least is admitted first. The first row has the light tenant alone: the
limit. The heavy tenant's cost is its loss of tokens per second, up to the light tenant's last
token. A step takes as long as in `stall_free`.
"""

from __future__ import annotations

import argparse
import dataclasses

from simulated import Run, linear_times, simulate
from stall_free import BASE_US, PER_TOKEN_US
from table import print_table
from workloads import Job, conversation

from jaxserve.kv.pages import PagePool
from jaxserve.metrics.statistics import percentile
from jaxserve.scheduler.scheduler import SchedulerConfig

ROWS = 64
BUDGET = 640


def serve(jobs: list[Job], fair_share: bool) -> Run:
    config = SchedulerConfig(
        policy="sarathi",
        max_num_seqs=ROWS,
        max_num_batched_tokens=BUDGET,
        max_prefill_tokens=BUDGET - ROWS,
        max_model_len=8192,
        fair_share=fair_share,
    )
    return simulate(jobs, config, PagePool(10_001, 16), linear_times(BASE_US, PER_TOKEN_US))


def first_token_us(run: Run, tenant: str) -> list[int]:
    return [
        times[0] - seq.arrival_us
        for seq, times in zip(run.sequences, run.token_us)
        if seq.tenant == tenant
    ]


def tokens_per_s(run: Run, tenant: str, until_us: int) -> float:
    """Output tokens of a tenant per second, up to a time."""
    tokens = sum(
        sum(time <= until_us for time in times)
        for seq, times in zip(run.sequences, run.token_us)
        if seq.tenant == tenant
    )
    return tokens * 1e6 / until_us


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heavy-rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--light-rate", type=float, default=0.25, help="requests per second")
    parser.add_argument("--seconds", type=int, default=600, help="how long both keep sending")
    args = parser.parse_args()
    rates = {"heavy": args.heavy_rate, "light": args.light_rate}
    jobs = [
        dataclasses.replace(job, tenant=tenant)
        for seed, (tenant, rate) in enumerate(rates.items())
        for job in conversation(round(rate * args.seconds), rate, seed)
    ]
    light = [job for job in jobs if job.tenant == "light"]
    until_us = max(job.arrival_us for job in light)
    runs = {
        "light alone": serve(light, fair_share=False),
        "first come, first served": serve(jobs, fair_share=False),
        "fair share": serve(jobs, fair_share=True),
    }
    unfair = runs["first come, first served"]
    unfair_p99 = percentile(first_token_us(unfair, "light"), 99)
    unfair_rate = tokens_per_s(unfair, "heavy", until_us)
    rows = []
    for name, run in runs.items():
        light_us = first_token_us(run, "light")
        heavy_us = first_token_us(run, "heavy")
        heavy_rate = tokens_per_s(run, "heavy", until_us)
        rows.append(
            (
                name,
                percentile(light_us, 50) / 1e6,
                percentile(light_us, 99) / 1e6,
                unfair_p99 / percentile(light_us, 99),
                percentile(heavy_us, 99) / 1e6 if heavy_us else None,
                heavy_rate if heavy_us else None,
                100 * (1 - heavy_rate / unfair_rate) if heavy_us else None,
                run.output_tokens_per_s,
            )
        )
    print_table(
        f"{args.heavy_rate} and {args.light_rate} requests a second for {args.seconds} s",
        (
            "admission",
            "light P50 TTFT s",
            "light P99 TTFT s",
            "first come / this",
            "heavy P99 TTFT s",
            "heavy tokens/s",
            "heavy loses %",
            "all tokens/s",
        ),
        rows,
    )


if __name__ == "__main__":
    main()
