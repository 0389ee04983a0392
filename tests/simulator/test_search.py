"""Capacities by simulation, their bounds, and the search that need not simulate everything."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from exhaustive import exhaustive
from hypothesis import given, settings
from hypothesis import strategies as st
from simulations import tiny_config

from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.steps.buckets import Buckets
from jaxserve.kv.layout import KVLayout
from jaxserve.metrics.fluidity import Deadlines
from jaxserve.simulator.deployments.bounds import LoadTokens, least_seconds
from jaxserve.simulator.deployments.capacity import CapacitySearch, Load, rate_at
from jaxserve.simulator.deployments.deployment import Deployment
from jaxserve.simulator.deployments.search import (
    Candidate,
    EngineUnderLoad,
    Outcome,
    Processes,
    front,
    outcomes,
    winner,
)
from jaxserve.simulator.deployments.slo import Slo
from jaxserve.simulator.simulation import Arrival
from jaxserve.simulator.step_times import LinearTimes
from jaxserve.simulator.transfer_worker import Link

SLO = Slo.of("ttft_p90=20ms,itl_p90=8ms")
RATE = 40.0
LINK = Link(1e9)


def deployment(scheduler: str = "sarathi", **settings: object) -> Deployment:
    config = tiny_config(scheduler, debug_kv=False, **settings)
    stages = config.pipeline_parallel_size
    limits = config.max_num_seqs, config.max_num_batched_tokens
    buckets = Buckets.from_config(*limits, pipelined=stages > 1)
    layout = KVLayout(config.page_size, max_chunk=config.max_num_batched_tokens)
    return Deployment(config, buckets, layout, 200, 1000, 0, 0, LINK, LINK)


def load(count: int = 40, rate: float = RATE, shared: int = 0, seed: int = 0) -> Load:
    """Poisson arrivals of prompts that have the first tokens in common."""
    draw, now_s, arrivals = random.Random(seed), 0.0, []
    for number in range(count):
        prompt = [0] * shared + [number + 1] * draw.randint(8, 48)
        params = SamplingParams(max_tokens=draw.randint(2, 16), ignore_eos=True)
        arrivals.append(Arrival(round(now_s * 1e6), prompt, params))
        now_s += draw.expovariate(rate)
    return Load(arrivals, rate)


def times(scale: float = 1.0, token_s: float = 5e-5) -> LinearTimes:
    return LinearTimes(base_s=1e-3 * scale, token_s=token_s * scale, pair_s=1e-7 * scale)


def capacity_step(scale: float, slo: Slo = SLO, requests: Load | None = None) -> int | None:
    engine = EngineUnderLoad(deployment(), times(scale), requests or load())
    return engine.capacity(slo, None, engine.bounds(slo).last_step).step


def counted(arrivals: list[Arrival], config: EngineConfig) -> tuple[int, int]:
    tokens = LoadTokens.of(arrivals, config)
    return tokens.prefill, tokens.decode


def test_tokens_of_a_load_count_a_common_prefix_once():
    prompts = ([1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 4, 6, 7], [9])
    params = SamplingParams(max_tokens=5)
    arrivals = [Arrival(0, prompt, params) for prompt in prompts]
    config = tiny_config("sarathi")
    assert counted(arrivals, config) == (8, 16)
    plain = dataclasses.replace(config, enable_prefix_caching=False)
    assert counted(arrivals, plain) == (14, 16)
    # The context is 128 tokens.
    cut = [Arrival(0, [1] * 126, params)]
    assert counted(cut, config) == (126, 1)


@pytest.mark.parametrize("scheduler", ["sarathi", "vllm", "orca"])
@pytest.mark.parametrize("shared", [0, 24])
@pytest.mark.parametrize("stages", [1, 2])
def test_nothing_is_served_faster_than_its_bound(scheduler, shared, stages):
    """All requests arrive at once; the bound is not far below what they take."""
    requests = load(shared=shared, rate=1e9)
    found = deployment(scheduler, pipeline_parallel_size=stages)
    simulation = found.simulation(times())
    simulation.run(requests.arrivals)
    took_s = simulation.clock.now() / 1e6
    tokens = LoadTokens.of(requests.arrivals, found.config)
    bound_s = least_seconds(times(), found.buckets, tokens, found.config)
    assert took_s / 3 < bound_s < took_s


def test_alone_is_a_bound_at_every_rate():
    engine = EngineUnderLoad(deployment(), times(), load())
    bounds = engine.bounds(SLO)
    found = engine.capacity(SLO, None, bounds.last_step)
    assert found.step < bounds.last_step
    assert all(alone <= value for alone, value in zip(bounds.alone, found.values))
    strict = Slo.of("ttft_p90=1us")
    assert engine.bounds(strict).rules_out(strict)
    assert not bounds.rules_out(SLO)
    # A prompt that others begin like may be shorter than it looks.
    assert EngineUnderLoad(deployment(), times(), load(shared=8)).bounds(SLO).alone[0] is None


def test_a_capacity_meets_the_slo_and_the_next_rate_does_not():
    requests, found = load(), capacity_step(1.0)
    for step, met in ((found, True), (found + 1, False)):
        simulation = deployment().simulation(times())
        arrivals = requests.at(step)
        simulation.run(arrivals)
        served = sorted(simulation.metrics.finished(), key=lambda each: int(each.request_id))
        served = [
            summary._replace(arrival_us=arrival.time_us)
            for summary, arrival in zip(served, arrivals)
        ]
        assert SLO.met(SLO.measured(served)) == met
    assert rate_at(0, RATE) == RATE


@pytest.mark.parametrize(
    "slo",
    [
        "itl_p90=2500us,ttft=1s",
        "ttft_p90=12ms",
        "e2e_p50=28ms",
        "fluidity_p90=0.9",
        "queue_p90=3ms",
    ],
)
@pytest.mark.parametrize("stages", [1, 2])
def test_a_rate_is_given_up_only_where_it_misses_the_slo(slo, stages):
    """Simulations end early where the SLO is missed for certain."""
    slo, served = Slo.of(slo, Deadlines(lambda tokens: 10_000, 4_000)), load()
    engine = deployment(pipeline_parallel_size=stages)
    outcomes_of_both = set()
    for step in range(-60, 61, 40):
        simulation, arrivals = engine.simulation(times(), slo.deadlines), served.at(step)
        simulation.run(arrivals)
        ended = sorted(simulation.metrics.finished(), key=lambda each: int(each.request_id))
        requests = [
            summary._replace(arrival_us=arrival.time_us)
            for summary, arrival in zip(ended, arrivals)
        ]
        met = slo.met(slo.measured(requests))
        found = CapacitySearch(engine, times(), served, slo).between(step - 1, step)
        assert (found.step == step) == met
        outcomes_of_both.add(met)
    assert outcomes_of_both == {True, False}


def test_a_capacity_does_not_depend_on_where_its_search_began():
    found, last = (
        capacity_step(1.0),
        EngineUnderLoad(deployment(), times(), load()).bounds(SLO).last_step,
    )
    for above in (found - 40, found - 7, found - 1):
        search = CapacitySearch(deployment(), times(), load(), SLO)
        assert search.between(above, last).step == found
    assert CapacitySearch(deployment(), times(), load(), SLO).between(found, last).simulations == 1
    exceeded = CapacitySearch(deployment(), times(), load(), SLO).between(found, last)
    assert exceeded.step is None


def test_requests_at_once_are_those_of_littles_law():
    slow, fast = -100, 0
    at_once = [CapacitySearch(deployment(), times(), load(), SLO).at_once(s) for s in (slow, fast)]
    session = deployment().session(times(), 28, 9)
    assert at_once[0] == pytest.approx(
        rate_at(slow, RATE) * (session.prefill_s + session.decode_s), rel=0.2
    )
    assert at_once[1] > at_once[0] * rate_at(fast, RATE) / rate_at(slow, RATE)


def test_capacity_grows_with_speed_and_with_looser_limits():
    by_speed = [capacity_step(scale) for scale in (1.6, 1.3, 1.0, 0.7)]
    assert by_speed == sorted(by_speed)
    assert by_speed[0] < by_speed[-1]
    looser = [Slo.of(f"ttft_p90={ms}ms,itl_p90=8ms") for ms in (10, 15, 20, 30)]
    by_slo = [capacity_step(1.0, slo) for slo in looser]
    assert by_slo == sorted(by_slo)
    assert by_slo[0] < by_slo[-1]


def test_an_slo_that_no_rate_meets_tells_the_best_there_is():
    slo = Slo.of("ttft_p90=1ms")
    engine = EngineUnderLoad(deployment(), times(), load())
    found = engine.capacity(slo, None, engine.bounds(slo).last_step)
    assert found.step is None
    assert found.values[0] > 1_000
    assert found.values[0] == pytest.approx(engine.bounds(slo).alone[0], rel=0.5)


def grid(
    seed: int, count: int = 8, num_requests: int = 24
) -> tuple[list[EngineUnderLoad], list[Candidate]]:
    """Deployments that differ in speed, cost and limits; some cost more and are no better."""
    draw = random.Random(seed)
    engines, candidates = [], []
    requests = load(count=num_requests, seed=seed)
    for _ in range(count):
        devices = draw.choice([1, 2, 4])
        seqs = draw.choice([1, 2, 4])
        speed = draw.choice([0.5, 1.0, 1.0, 2.0])
        found = deployment(
            draw.choice(["sarathi", "vllm"]),
            max_num_seqs=seqs,
            max_num_batched_tokens=seqs + draw.choice([16, 32]),
            pipeline_parallel_size=draw.choice([1, 1, 2]),
        )
        shared = dataclasses.replace(requests, rate=RATE / devices)
        engine = EngineUnderLoad(found, times(1 / speed), shared)
        engines.append(engine)
        candidates.append(Candidate(devices * speed * draw.choice([1.0, 1.5]), engine.bounds(SLO)))
    return engines, candidates


def searched(
    engines: list[EngineUnderLoad],
    candidates: list[Candidate],
    known: dict[int, Outcome] | None = None,
    prune: bool = True,
    count: int = 1,
    ahead: int = 1,
) -> tuple[dict[int, Outcome], int]:
    """Outcomes in the order in which they are found, and how many searches were begun."""
    begun = itertools.count()
    with Processes(SLO, count) as processes:

        def evaluate(number: int, above: int | None, last: int):
            next(begun)
            return processes.submit(engines[number], above, last)

        found = dict(outcomes(candidates, evaluate, SLO, known, prune=prune, ahead=ahead))
    return found, next(begun)


@settings(max_examples=2, deadline=None)
@given(st.integers(0, 1_000))
def test_the_winner_is_that_of_an_exhaustive_search(seed):
    assert_as_exhaustive(*grid(seed))


@exhaustive
def test_the_winner_among_40_is_that_of_an_exhaustive_search():
    assert_as_exhaustive(*grid(40, count=40, num_requests=12))


def assert_as_exhaustive(engines: list[EngineUnderLoad], candidates: list[Candidate]) -> None:
    pruned, _ = searched(engines, candidates)
    exhaustive, _ = searched(engines, candidates, prune=False)
    assert winner(candidates, pruned) == winner(candidates, exhaustive)
    assert front(candidates, pruned) == front(candidates, exhaustive)
    simulations = [sum(o.simulations for o in found.values()) for found in (pruned, exhaustive)]
    assert simulations[0] <= simulations[1]
    steps = {number: outcome.step for number, outcome in pruned.items() if outcome.step is not None}
    assert steps.items() <= {n: outcome.step for n, outcome in exhaustive.items()}.items()


def test_bounds_save_simulations():
    engines, candidates = grid(1, count=16)
    pruned, _ = searched(engines, candidates)
    exhaustive, _ = searched(engines, candidates, prune=False)
    simulations = [sum(o.simulations for o in found.values()) for found in (pruned, exhaustive)]
    assert simulations[0] < simulations[1] / 2
    assert {outcome.kind for outcome in pruned.values()} >= {"met", "dominated"}


def test_what_is_known_is_not_searched_again():
    engines, candidates = grid(2)
    whole, all_begun = searched(engines, candidates)
    for done in (3, len(whole)):
        known = dict(itertools.islice(whole.items(), done))
        again, begun = searched(engines, candidates, known)
        assert list(again.items()) == list(whole.items())
        simulated = sum(1 for outcome in known.values() if outcome.simulations)
        assert begun == all_begun - simulated


def test_several_processes_find_the_same():
    engines, candidates = grid(3, count=4)
    alone, _ = searched(engines, candidates, ahead=2)
    together, _ = searched(engines, candidates, ahead=2, count=2)
    assert list(together.items()) == list(alone.items())


def test_the_winner_is_the_cheapest_that_serves_the_load():
    bounds = EngineUnderLoad(deployment(), times(), load()).bounds(SLO)
    candidates = [Candidate(cost, bounds) for cost in (1.0, 2.0, 2.0, 8.0)]
    found = {n: Outcome("met", step, (1.0, 1.0)) for n, step in enumerate((-1, 3, 5, 90))}
    assert winner(candidates, found) == 2
    assert front(candidates, found) == [0, 2, 3]
    none = {number: Outcome("met", -5, (1.0, 1.0)) for number in range(4)}
    assert winner(candidates, none) is None
    assert winner(candidates, dict.fromkeys(range(4), Outcome("unmet", None, (1.0, 1.0)))) is None
