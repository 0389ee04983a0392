"""Latency and preemptions of 16 replicas under outputs of very different lengths, in virtual time.

The length of an output is not known when its request is dispatched. By turns, some replicas fill up
while others have room, and preempt. Llumnix (Sun et al., OSDI 2024) dispatches by freeness and
moves running requests. The setting is that of its paper: LLaMA-7B on A10s, whose pools hold 851
pages of 16 tokens, and lengths of prompts and outputs by a power law with a mean of 256 tokens.
Step times are modelled from the data sheet.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Sequence

from table import print_table

from jaxserve.cluster.simulated import SimulatedCluster
from jaxserve.core.devices import DeviceSpec
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.steps.buckets import Buckets
from jaxserve.core.steps.work import StepWork
from jaxserve.kv.layout import KVLayout
from jaxserve.metrics.fluidity import INTERACTIVE
from jaxserve.metrics.statistics import percentile
from jaxserve.metrics.summaries import SequenceSummary
from jaxserve.simulator.deployments.deployment import Deployment
from jaxserve.simulator.replicas import SimulatedReplica, shares
from jaxserve.simulator.roofline import Roofline
from jaxserve.simulator.simulation import Arrival
from jaxserve.simulator.transfer_worker import Link

LAYERS, HIDDEN, INNER, VOCAB, PAGE, PAGES = 32, 4096, 11_008, 32_000, 16, 851
SHORTEST, LONGEST = 54, 6144
"""Tokens; with a density that falls with the square of the length, their mean is 256."""
A10 = dataclasses.replace(
    DeviceSpec.of("l4"), name="A10", memory_bytes_per_s=600e9, flops={"bfloat16": 125e12}
)
LAYER_WEIGHTS = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * INNER)
WORK = StepWork(
    dtype="bfloat16",
    itemsize=2,
    hidden_size=HIDDEN,
    windows={None: LAYERS},
    layer_weights=LAYER_WEIGHTS,
    layer_bytes=2 * LAYER_WEIGHTS,
    head_weights=HIDDEN * VOCAB,
    head_bytes=2 * HIDDEN * VOCAB,
    query_size=HIDDEN,
    kv_bytes=2 * 2 * HIDDEN,
)
PAGE_BYTES = PAGE * WORK.kv_bytes * LAYERS


def deployment() -> Deployment:
    config = EngineConfig(
        max_model_len=2 * LONGEST + PAGE,
        max_num_seqs=256,
        max_num_batched_tokens=768,
        page_size=PAGE,
        scheduler="sarathi",
    )
    buckets = Buckets.from_config(config.max_num_seqs, config.max_num_batched_tokens)
    layout = KVLayout(PAGE, max_chunk=config.max_num_batched_tokens)
    link = Link(A10.host_bytes_per_s * A10.link_efficiency, 20e-6)
    return Deployment(config, buckets, layout, PAGES + 1, PAGE_BYTES, 0, 0, link, link)


def load(count: int, rate: float, seed: int) -> list[Arrival]:
    draw, now_s, arrivals = random.Random(seed), 0.0, []

    def length() -> int:
        return round(SHORTEST / (1 - draw.random() * (1 - SHORTEST / LONGEST)))

    for number in range(count):
        params = SamplingParams(max_tokens=length(), ignore_eos=True)
        arrivals.append(Arrival(round(now_s * 1e6), [number] * length(), params))
        now_s += draw.expovariate(rate)
    return arrivals


def row(name: str, served: Sequence[SequenceSummary], moved: int, first: float | None) -> tuple:
    ttft_s = [summary.ttft_us / 1e6 for summary in served]
    per_token_ms = [
        (s.last_token_us - s.first_token_us) / 1e3 / (s.output_tokens - 1)
        for s in served
        if s.output_tokens > 1
    ]
    p99_s = percentile(ttft_s, 99)
    preempted = sum(summary.preemptions for summary in served)
    mean_s = sum(ttft_s) / len(ttft_s)
    ratio = (first or p99_s) / p99_s
    return name, mean_s, p99_s, ratio, percentile(per_token_ms, 99), preempted, moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--rate", type=float, default=18.0, help="requests per second")
    parser.add_argument("--num-requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    arrivals = load(args.num_requests, args.rate, args.seed)
    each = deployment()

    def replica() -> SimulatedReplica:
        return SimulatedReplica.of(each, Roofline(A10, WORK, PAGE_BYTES), WORK, INTERACTIVE)

    served = []
    for share in shares(lambda: iter(arrivals), args.replicas):
        one = replica()
        one.serve(share)
        served += one.summaries()
    rows = [row("round robin", served, 0, None)]
    for name, moves in (("freeness", False), ("freeness, and moves", True)):
        cluster = SimulatedCluster(each, replica, args.replicas, moves=moves)
        cluster.serve(arrivals)
        summaries = cluster.summaries(INTERACTIVE)
        rows.append(row(name, summaries, cluster.num_moved, rows[0][2]))
    print_table(
        f"{args.num_requests:,} requests, {args.rate} per second, to {args.replicas} replicas",
        (
            "dispatch",
            "mean TTFT s",
            "P99 TTFT s",
            "round robin / this",
            "P99 ms/token",
            "preemptions",
            "moved",
        ),
        rows,
    )


if __name__ == "__main__":
    main()
