"""Autoscaling of simulated engines: the scheduler and the policies that serve, in virtual time."""

from __future__ import annotations

import random

import pytest
from simulations import PAGE_SIZE, simulation

from jaxserve.cluster.policies.autoscale import Autoscaler
from jaxserve.cluster.policies.dispatch import Demand, ReplicaLoad, dispatch
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.engine.request import Request
from jaxserve.simulator.simulation import Arrival

NUM_PAGES, TICK_US, LOAD_US = 41, 20_000, 200_000
CALM, RUSH = 10, 200
"""Requests a second; an engine alone serves about half of those of a rush."""


class Replica:
    """A simulated engine, and its load as a router counts it."""

    def __init__(self, ready_us: int) -> None:
        self.ready_us = ready_us
        self.simulation = simulation("sarathi", NUM_PAGES, debug_kv=False)
        self.load = ReplicaLoad(NUM_PAGES - 1, PAGE_SIZE, max_num_seqs=4)
        self.leaves = False
        self.requests: dict[int, Request] = {}

    def add(self, key: int, arrival: Arrival) -> None:
        self.load.add(key, Demand((), len(arrival.token_ids)))
        self.requests[key] = next(self.simulation.serve([arrival]))

    def run_to(self, time_us: int) -> None:
        """Steps until then."""
        clock = self.simulation.clock
        for _ in self.simulation.serve([], stop=lambda: clock.now() >= time_us):
            raise AssertionError("nothing arrives")
        for key, request in list(self.requests.items()):
            seq = request.sequence_outputs[0].seq
            self.load.grow(key, len(seq.output_token_ids) - self.load.demands[key].num_output)
            if request.finished:
                self.load.remove(key)
                del self.requests[key]


def serve(rates: list[tuple[float, float]], scaler: Autoscaler):
    """Arrivals at each rate (a second) for so many seconds; then to the end. How long each request
    waited, the decisions, and the numbers of replicas, period by period."""
    draw, replicas, all_replicas = random.Random(1), [Replica(0)], []
    decisions, numbers, now_us, count = [], [], 0, 0
    all_replicas += replicas
    for rate, seconds in rates:
        for _ in range(int(seconds * 1e6 / TICK_US)):
            for replica in replicas:
                replica.load.draining = replica.leaves or now_us < replica.ready_us
            for _ in range(int(draw.random() + rate * TICK_US / 1e6)):
                tokens = [draw.randrange(256) for _ in range(draw.randint(4, 40))]
                params = SamplingParams(
                    temperature=1.0, max_tokens=draw.randint(8, 40), ignore_eos=True, seed=count
                )
                place = dispatch([each.load for each in replicas], Demand((), len(tokens)))
                replicas[place].add(count, Arrival(now_us, tokens, params))
                count += 1
            now_us += TICK_US
            for replica in list(replicas):
                replica.run_to(now_us)
                if replica.leaves and not replica.requests:
                    replicas.remove(replica)
            decision = scaler.decide([each.load for each in replicas], now_us / 1e6)
            if decision == "add":
                replicas.append(Replica(now_us + LOAD_US))
                replicas[-1].load.draining = True
                all_replicas.append(replicas[-1])
            elif decision is not None:
                replicas[decision.replica].leaves = True
            if decision is not None:
                decisions.append("add" if decision == "add" else "remove")
            numbers.append(len(replicas))
    assert not any(replica.requests for replica in replicas)
    ended = [each for replica in all_replicas for each in replica.simulation.metrics.finished()]
    assert len(ended) == count
    return sorted(each.queue_us for each in ended), decisions, numbers


def test_replicas_follow_the_load_and_requests_wait_less():
    rates = [(CALM, 0.5), (RUSH, 1.5), (CALM, 2.5), (0, 2.0)]
    waits, decisions, numbers = serve(rates, Autoscaler(1, 4, add_after_s=0.1, remove_after_s=0.5))
    assert min(numbers) == numbers[0] == numbers[-1] == 1 and 1 < max(numbers) <= 4
    assert decisions == sorted(decisions), "all are added, then all are removed"
    assert decisions.count("add") == decisions.count("remove")
    alone, none, _ = serve([*rates, (0, 5.0)], Autoscaler(1, 1))
    assert none == [] and len(alone) == len(waits)
    place = int(0.99 * len(alone))
    assert waits[place] < alone[place] / 2


@pytest.mark.parametrize("rate", [CALM, RUSH / 2, RUSH])
def test_a_steady_load_is_not_answered_by_adding_and_removing(rate):
    scaler = Autoscaler(1, 4, add_after_s=0.1, remove_after_s=0.5)
    _, decisions, _ = serve([(rate, 3.0), (0, 2.0)], scaler)
    while decisions and decisions[-1] == "remove":
        decisions.pop()  # after the last arrival
    assert "remove" not in decisions
