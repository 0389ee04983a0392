"""Prefix cache hits of several replicas on the requests of a real service, in virtual time.

Replays Mooncake's conversation trace (Qin et al., FAST 2025; `conversation_trace.jsonl` of its
release) to replicas, and to one engine with the pages and the slots of all of them: as one cache
has every prefix once, its hit rate is what routing can reach. As in `mooncake_hits.py` a block of
512 tokens is one page of 16, all lengths are divided by 32, and no request hits an output. Engines
are those of `migrate_tail.py`, LLaMA-7B on A10s.

    python benchmarks/mooncake_replicas.py conversation_trace.jsonl
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

from migrate_tail import A10, PAGE, PAGE_BYTES, WORK, deployment
from table import print_table
from workloads import read_block_trace

from jaxserve.cluster.simulated import SimulatedCluster
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.steps.buckets import Buckets
from jaxserve.metrics.fluidity import INTERACTIVE
from jaxserve.metrics.statistics import percentile
from jaxserve.metrics.summaries import SequenceSummary
from jaxserve.simulator.deployments.deployment import Deployment
from jaxserve.simulator.replicas import SimulatedReplica
from jaxserve.simulator.roofline import Roofline
from jaxserve.simulator.simulation import Arrival


def read(path: Path, count: int, speed: float) -> list[Arrival]:
    return [
        Arrival(
            round(job.arrival_us / speed),
            job.token_ids,
            SamplingParams(max_tokens=job.max_tokens, ignore_eos=True),
        )
        for job in read_block_trace(path, count, PAGE)
    ]


def engine(num_pages: int, num_seqs: int, num_tokens: int) -> Deployment:
    each = deployment()
    settings = {"max_num_seqs": num_seqs, "max_num_batched_tokens": num_tokens}
    return dataclasses.replace(
        each,
        config=dataclasses.replace(each.config, **settings),
        buckets=Buckets.from_config(num_seqs, num_tokens),
        layout=dataclasses.replace(each.layout, max_chunk=num_tokens),
        num_pages=num_pages + 1,
    )


def replica(each: Deployment) -> SimulatedReplica:
    return SimulatedReplica.of(each, Roofline(A10, WORK, PAGE_BYTES), WORK, INTERACTIVE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="the trace, in JSON lines")
    parser.add_argument("--num-requests", type=int, default=3000, help="its first so many rows")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--pages", type=int, default=4096, help="KV pages of each replica")
    parser.add_argument("--speed", type=float, default=2.0, help="of the trace's clock")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    count = args.replicas
    arrivals = read(args.trace, args.num_requests, args.speed)
    prompts = sum(len(arrival.token_ids) for arrival in arrivals)
    one = engine(args.pages, 256, 512)
    rows: list[tuple] = []

    def add(name: str, served: Sequence[SequenceSummary], pulled: int, moved: int) -> None:
        hits = sum(summary.cached_tokens for summary in served)
        mean_s = sum(summary.ttft_us for summary in served) / len(served) / 1e6
        p99_s = percentile([summary.ttft_us for summary in served], 99) / 1e6
        ratio = hits / prompts / (rows[0][1] / 100) if rows else 1.0
        rows.append(
            (name, 100 * hits / prompts, ratio, mean_s, p99_s, 100 * pulled / prompts, moved)
        )

    big = replica(engine(count * args.pages, count * 256, count * 512))
    big.serve(arrivals)
    add("one engine of all pages", big.summaries(), 0, 0)
    draw, shares = random.Random(args.seed), [[] for _ in range(count)]
    for arrival in arrivals:
        draw.choice(shares).append(arrival)
    served = []
    for share in shares:
        each = replica(one)
        each.serve(share)
        served += each.summaries()
    add("replicas, at random", served, 0, 0)
    for name, pulls in (("replicas, by prefix", False), ("replicas, by prefix, pulls", True)):
        cluster = SimulatedCluster(one, lambda: replica(one), count, pulls=pulls)
        cluster.serve(arrivals)
        summaries = cluster.summaries(INTERACTIVE)
        add(name, summaries, cluster.pulls.num_tokens, cluster.num_moved)
    print_table(
        f"{len(arrivals):,} requests to {count} replicas of {args.pages:,} pages",
        ("dispatch", "hits %", "of one engine", "mean TTFT s", "P99 TTFT s", "pulled %", "moved"),
        rows,
    )


if __name__ == "__main__":
    main()
