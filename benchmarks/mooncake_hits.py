"""Prefix cache hits on the requests of a real service, by pool size, on a virtual clock.

Replays Mooncake's conversation trace (Qin et al., FAST 2025; `conversation_trace.jsonl` of its
release), whose prompts are given as blocks of 512 tokens. For speed, a block is one page of 16
tokens here, so all lengths are divided by 32, and a step computes at most 256 tokens. The trace has
no outputs, so no request hits them.

An infinite cache that has every earlier prompt immediately is the bound of the hit rate. The
transfers of the host tier take no time, so every hit is worth a fetch.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from simulated import Run, linear_times, simulate
from table import print_table
from workloads import Job, read_block_trace

from jaxserve.kv.manager import KVManager
from jaxserve.kv.pages import PagePool
from jaxserve.kv.tier import Tier
from jaxserve.scheduler.scheduler import SchedulerConfig
from jaxserve.simulator.executor import VirtualClock
from jaxserve.simulator.transfer_worker import Link, SimulatedTransferWorker

PAGE_SIZE = 16
ROWS = 128
BUDGET = 256
POOL_PAGES = (512, 2048, 8192, 32_768)
"""Pages on the device. The longest prompt takes 247."""
HOST_FACTOR = 4
"""Pages on the host, for each on the device."""
IMAGE_BYTES = 8


def serve(jobs: list[Job], num_pages: int, num_host_pages: int) -> tuple[Run, KVManager]:
    config = SchedulerConfig(
        policy="sarathi",
        max_num_seqs=ROWS,
        max_num_batched_tokens=BUDGET,
        max_prefill_tokens=BUDGET - ROWS,
        max_model_len=8192,
    )
    pool, times = PagePool(num_pages + 1, PAGE_SIZE), linear_times(2000, 200)
    if not num_host_pages:
        kv = KVManager(pool)
        return simulate(jobs, config, kv, times), kv
    clock = VirtualClock()
    worker = SimulatedTransferWorker(
        {Tier.HOST: Link(math.inf)}, page_bytes=IMAGE_BYTES, clock=clock, staging_buffers=1 << 16
    )
    kv = KVManager(
        pool,
        preemption="swap",
        tiers={Tier.HOST: num_host_pages},
        page_bytes=IMAGE_BYTES,
        transfer_worker=worker,
    )
    return simulate(jobs, config, kv, times, clock=clock, worker=worker), kv


def most_hits(jobs: list[Job]) -> int:
    """Prompt tokens that an infinite cache finds, if all but the last of a prompt may be found."""
    known: dict[int, int] = {}  # Tokens known of the block that begins with this token.
    hits = 0
    for job in jobs:
        found = 0
        starts = range(0, job.prompt_tokens, PAGE_SIZE)
        blocks = [job.token_ids[start : start + PAGE_SIZE] for start in starts]
        for block in blocks:
            common = min(known.get(block[0], 0), len(block))
            found += common
            if common < PAGE_SIZE:
                break
        for block in blocks:
            known[block[0]] = max(known.get(block[0], 0), len(block))
        hits += min(found, job.prompt_tokens - 1)
    return hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="the trace, in JSON lines")
    parser.add_argument("--num-requests", type=int, default=3000, help="its first so many rows")
    args = parser.parse_args()
    jobs = read_block_trace(args.trace, args.num_requests, PAGE_SIZE)
    total = sum(job.prompt_tokens for job in jobs)
    bound = most_hits(jobs)
    num_blocks = len({token for job in jobs for token in job.token_ids})
    rows = []
    for num_pages in POOL_PAGES:
        for num_host_pages in (0, HOST_FACTOR * num_pages):
            run, kv = serve(jobs, num_pages, num_host_pages)
            hits = sum(run.cached_tokens.values())
            rows.append(
                (
                    num_pages,
                    num_host_pages or None,
                    100 * num_pages / num_blocks,
                    100 * hits / total,
                    hits / bound,
                    total / run.num_prefill_tokens,
                    kv.transfer_counters.fetched_pages.get(Tier.HOST, 0),
                    run.num_preemptions,
                )
            )
    print_table(
        f"{len(jobs)} requests, {num_blocks:,} different blocks; "
        f"an infinite cache has {100 * bound / total:.2f} % of the prompt tokens",
        (
            "pages",
            "host pages",
            "pages / blocks %",
            "hits %",
            "hits / infinite",
            "prompt / computed",
            "fetched",
            "preempted",
        ),
        rows,
    )


if __name__ == "__main__":
    main()
