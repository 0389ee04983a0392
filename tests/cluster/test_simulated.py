"""Simulated replicas: nothing is lost, requests move where that helps, and none moves for ever."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
from simulations import PAGE_SIZE, TIMES, tiny_config

from jaxserve.cluster.policies.autoscale import Autoscaler
from jaxserve.cluster.simulated import SimulatedCluster
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.steps.buckets import Buckets
from jaxserve.core.steps.work import StepWork
from jaxserve.kv.layout import KVLayout
from jaxserve.metrics.fluidity import INTERACTIVE
from jaxserve.metrics.statistics import percentile
from jaxserve.metrics.summaries import SequenceSummary
from jaxserve.simulator.deployments.deployment import Deployment
from jaxserve.simulator.replicas import SimulatedReplica, shares
from jaxserve.simulator.simulation import Arrival
from jaxserve.simulator.transfer_worker import Link

WORK = StepWork("float32", 4, 8, {None: 1}, 100, 400, 10, 40, 8, 64)


def deployment(host_pages: int = 0, **settings: object) -> Deployment:
    config = tiny_config("sarathi", **{"max_num_seqs": 8, "max_num_batched_tokens": 40} | settings)
    buckets = Buckets.from_config(config.max_num_seqs, config.max_num_batched_tokens)
    layout = KVLayout(PAGE_SIZE, max_chunk=config.max_num_batched_tokens)
    link = Link(1e6, 1e-3)
    return Deployment(config, buckets, layout, 61, 1000, host_pages, 0, link, link)


def power_law(count: int, rate: float, seed: int = 0) -> list[Arrival]:
    """Poisson arrivals of outputs of which most are short and few are very long."""
    draw, now_s, arrivals = random.Random(seed), 0.0, []
    for number in range(count):
        tokens = [number + 1] * min(40, int(4 * draw.paretovariate(1.0)))
        length = min(80, int(4 * draw.paretovariate(0.8)))
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        arrivals.append(Arrival(round(now_s * 1e6), tokens, params))
        now_s += draw.expovariate(rate)
    return arrivals


def replica(each: Deployment) -> SimulatedReplica:
    return SimulatedReplica.of(each, TIMES, WORK, INTERACTIVE)


def routed(
    arrivals: Sequence[Arrival],
    count: int,
    scaler: Autoscaler | None = None,
    *,
    num_prefill: int = 0,
    moves: bool = True,
    pulls: bool = True,
    **settings: object,
) -> tuple[SimulatedCluster, list[SequenceSummary]]:
    each = deployment(**settings)
    cluster = SimulatedCluster(
        each,
        lambda: replica(each),
        count,
        scaler,
        load_us=100_000,
        num_prefill=num_prefill,
        moves=moves,
        pulls=pulls,
    )
    cluster.serve(arrivals)
    served = cluster.summaries(INTERACTIVE)
    assert [summary.output_tokens for summary in served] == [
        arrival.params.max_tokens for arrival in arrivals
    ]
    assert all(list(s.token_us) == sorted(s.token_us) for s in served)
    assert all(s.arrival_us <= s.admitted_us <= s.first_token_us for s in served)
    assert all(r.simulation.core.kv.pool.num_used == 0 for r in cluster.replicas)
    return cluster, served


def in_turn(arrivals: Sequence[Arrival], count: int) -> list[SequenceSummary]:
    """By round robin, each on the replica that it was dispatched to."""
    found = []
    for share in shares(lambda: iter(arrivals), count):
        one = replica(deployment())
        one.serve(share)
        found += one.summaries()
    return found


def p99_ttft(served: Sequence[SequenceSummary]) -> int:
    return percentile([summary.ttft_us for summary in served], 99)


def preemptions(served: Sequence[SequenceSummary]) -> int:
    return sum(summary.preemptions for summary in served)


def test_the_router_shortens_the_tail_and_saves_preemptions():
    arrivals = power_law(400, 200)
    cluster, served = routed(arrivals, 4)
    by_turns = in_turn(arrivals, 4)
    assert cluster.num_moved
    assert p99_ttft(served) < p99_ttft(by_turns) / 2
    assert preemptions(served) < preemptions(by_turns) / 2


@pytest.mark.parametrize(("host_pages", "caching"), [(0, True), (40, False)])
def test_no_request_is_lost_whatever_moves(host_pages, caching):
    arrivals = power_law(200, 400, seed=3)
    cluster, _ = routed(arrivals, 3, host_pages=host_pages, enable_prefix_caching=caching)
    assert cluster.num_moved
    again, _ = routed(arrivals, 3, host_pages=host_pages, enable_prefix_caching=caching)
    assert again.num_moved == cluster.num_moved


def test_prefill_and_decode_apart():
    """A request moves once it has a token, and what decodes is not delayed by prompts."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    arrivals = [Arrival(number * 60_000, [number + 1] * 36, params) for number in range(40)]
    cluster, served = routed(arrivals, 2, num_prefill=1)
    assert cluster.num_moved == len(arrivals)
    prefills, decodes = (each.simulation.metrics.finished() for each in cluster.replicas)
    assert len(prefills) == len(decodes) == len(arrivals)
    assert all(summary.output_tokens < 30 for summary in prefills)
    assert sum(s.output_tokens for s in (*prefills, *decodes)) == 60 * len(arrivals)
    assert len(served) == len(arrivals)


def test_pages_of_a_prompt_are_copied_while_it_is_computed():
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    arrivals = [Arrival(n * 500_000, [n + 1] * 100, params) for n in range(8)]
    fast = Link(1e8, 1e-5)
    each = dataclasses.replace(deployment(max_num_batched_tokens=24), host_link=fast)
    cluster = SimulatedCluster(each, lambda: replica(each), 2, num_prefill=1)
    cluster.serve(arrivals)
    assert all(s.output_tokens == 16 for s in cluster.summaries(INTERACTIVE))
    assert cluster.num_moved == len(arrivals)
    # What is left of a prompt is that of the last chunk.
    assert cluster.copies.during_prefill == 96 * len(arrivals)
    assert 96 * len(arrivals) <= cluster.copies.copied < 116 * len(arrivals)


def test_prefixes_are_pulled_and_not_computed_again():
    """Conversations over one long prompt: while they are too many for one replica."""
    prompt, params = list(range(1, 33)), SamplingParams(max_tokens=24, ignore_eos=True)
    arrivals = [Arrival(n * 20_000, [*prompt, 100 + n], params) for n in range(30)]
    hits, computed = {}, {}
    for pulls in (False, True):
        cluster, served = routed(arrivals, 3, pulls=pulls)
        hits[pulls] = sum(summary.cached_tokens for summary in served)
        computed[pulls] = sum(r.counted.num_tokens for r in cluster.replicas)
        assert (cluster.pulls.num_tokens > 0) == pulls
    assert computed[False] - computed[True] == hits[True] - hits[False] > 0


def test_on_a_static_load_no_request_moves():
    """As many long requests on each replica as its pool and its slots hold."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    arrivals = [Arrival(0, [number + 1] * 8, params) for number in range(12)]
    cluster, _ = routed(arrivals, 4)
    assert cluster.num_moved == 0


def test_tenants_of_a_removed_replica_wait_no_more():
    """One counts as waiting where it was when its replica's counters were exchanged last."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    rush = [Arrival(n * 4_000, [n + 1] * 16, params, tenant="rush") for n in range(120)]
    calm = [Arrival(3_000_000 + n * 500_000, [n + 1] * 16, params, tenant="calm") for n in range(9)]
    scaler = Autoscaler(1, 4, add_after_s=0.2, remove_after_s=1.0)
    cluster, _ = routed([*rush, *calm], 1, scaler, fair_share=True)
    assert cluster.num_removed and len(cluster.replicas) > 1
    assert set(cluster._shares._waiting) == {replica.index for replica in cluster._present}


def test_replicas_come_and_go_with_the_load():
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    rush = [Arrival(number * 4_000, [number + 1] * 16, params) for number in range(250)]
    calm = [
        Arrival(2_000_000 + number * 500_000, [number + 1] * 16, params) for number in range(30)
    ]
    scaler = Autoscaler(1, 4, add_after_s=0.2, remove_after_s=1.0)
    cluster, served = routed([*rush, *calm], 1, scaler)
    assert 1 <= cluster.num_added <= 3 and cluster.num_removed == cluster.num_added
    alone, waited = routed([*rush, *calm], 1)
    assert p99_ttft(served) < p99_ttft(waited)
    end_us = served[-1].finish_us
    assert alone.replica_us >= end_us and end_us < cluster.replica_us < 4 * end_us
