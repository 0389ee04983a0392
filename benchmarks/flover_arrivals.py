"""Iterations for 32 requests arriving at random, one by one or fused into one loop.

Flover's third experiment (Yao et al. 2023) on a virtual clock: 512 tokens each at 11.33 ms per
iteration, exponential gaps of mean λ. A single draw scatters widely for long gaps, so the fused
count is the mean of four seeds. The last column is Flover's memory shuffle in its paged form: rows
computed when every iteration runs the largest program, over rows computed when it runs the smallest
program that fits the live ones.
"""

from __future__ import annotations

import random
from statistics import fmean

from simulated import linear_times, simulate
from table import print_table
from workloads import Job

from jaxserve.core.steps.buckets import Buckets
from jaxserve.kv.pages import PagePool
from jaxserve.scheduler.scheduler import SchedulerConfig

MEAN_GAPS_MS = (20, 50, 100, 150, 200, 300, 400, 500, 750, 1000, 2000, 3000, 5000)
PUBLISHED = (557, 616, 748, 888, 911, 1174, 1366, 1537, 2239, None, 5483, 7738, 10694)
REQUESTS, OUTPUT_TOKENS, PROMPT_TOKENS = 32, 512, 8
ITERATION_US = 11_330


def arrivals(mean_gap_ms: float, seed: int) -> list[Job]:
    """The first request arrives at 0."""
    rng = random.Random(seed)
    now, jobs = 0.0, []
    for _ in range(REQUESTS):
        jobs.append(Job(round(now), PROMPT_TOKENS, OUTPUT_TOKENS, max_tokens=OUTPUT_TOKENS))
        now += rng.expovariate(1 / mean_gap_ms) * 1e3
    return jobs


def main() -> None:
    buckets = Buckets.from_config(REQUESTS, REQUESTS * (PROMPT_TOKENS + 1))
    config = SchedulerConfig(
        policy="sarathi",
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=REQUESTS * (PROMPT_TOKENS + 1),
        max_prefill_tokens=buckets.max_prefill_tokens,
        max_model_len=1024,
    )
    sequential = REQUESTS * OUTPUT_TOKENS
    rows = []
    for gap_ms, published in zip(MEAN_GAPS_MS, PUBLISHED):
        fused, never_idle, shrink = [], [], []
        for seed in range(4):
            jobs = arrivals(gap_ms, seed)
            run = simulate(jobs, config, PagePool(2048, 16), linear_times(ITERATION_US, 0))
            fused.append(len(run.steps))
            # The last joins the iteration after the next, which is planned already.
            never_idle.append(-(-jobs[-1].arrival_us // ITERATION_US) + 1 + OUTPUT_TOKENS)
            decodes = [step.num_decodes for step in run.steps if not step.num_prefill_tokens]
            small = sum(buckets.pick(count, 0).rows for count in decodes)
            shrink.append(len(decodes) * REQUESTS / small)
        rows.append(
            (
                gap_ms,
                sequential,
                round(fmean(fused)),
                round(fmean(never_idle)),
                published,
                sequential / fmean(fused),
                fmean(shrink),
            )
        )
    print_table(
        f"{REQUESTS} requests of {OUTPUT_TOKENS} tokens, {ITERATION_US / 1e3} ms an iteration",
        (
            "λ ms",
            "sequential",
            "fused",
            "if never idle",
            "published",
            "sequential / fused",
            "rows, largest / smallest",
        ),
        rows,
    )


if __name__ == "__main__":
    main()
