"""Which devices prefill and which decode: by hand, by brute force, and from simulated engines."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from test_search import RATE, SLO, deployment, load, times

from jaxserve.core.errors import ConfigError
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.core.steps.plan import ScheduledChunk, StepPlan
from jaxserve.simulator.deployments.phases import (
    DecodeTimes,
    SplitEngines,
    decode_only,
    goodput_by_role,
    prefill_only,
)
from jaxserve.simulator.deployments.placement import EngineGoodput, best_placement
from jaxserve.simulator.deployments.search import EngineUnderLoad
from jaxserve.simulator.deployments.slo import Slo

DISTSERVE = EngineGoodput(prefill=5.6, decode=10.0, both=1.6)
"""OPT-13B on one A100, prompts of 512 and outputs of 64 tokens (Zhong et al. 2024, figure 1)."""


def test_the_example_of_distserve():
    """Two prefill engines serve one decode engine: 10 requests/s by three devices, 3.3 each."""
    found = best_placement([DISTSERVE], 3)
    assert (found.num_prefill, found.num_decode, found.goodput) == (2, 1, 10.0)
    assert found.goodput / found.devices / DISTSERVE.both == pytest.approx(2.1, abs=0.05)
    assert best_placement([DISTSERVE], 2).goodput == 5.6


def test_engines_that_do_both_win_where_phases_cannot_be_balanced():
    """On one device nothing can be apart. Chunked prefill at 5 requests/s an engine: two of them
    beat one of each role, three only equal them, and then the simpler is chosen."""
    assert not best_placement([DISTSERVE], 1).disaggregated
    chunked = dataclasses.replace(DISTSERVE, both=3.0)
    assert best_placement([chunked], 2).goodput == 6.0
    assert not best_placement([chunked], 2).disaggregated
    even = dataclasses.replace(DISTSERVE, both=10 / 3)
    assert not best_placement([even], 3).disaggregated
    assert best_placement([DISTSERVE], 3).disaggregated


def test_each_role_has_the_mesh_that_suits_it():
    """Of 6 devices: prefill on tensor-parallel pairs, decode on single devices."""
    single = EngineGoodput(prefill=1.0, decode=8.0, both=0.5)
    pair = EngineGoodput(prefill=4.0, decode=9.0, both=2.0, tensor=2)
    found = best_placement([single, pair], 6)
    assert (found.prefill, found.num_prefill) == (pair, 2)
    assert (found.decode, found.num_decode, found.goodput, found.devices) == (single, 2, 8.0, 6)
    with pytest.raises(ValueError, match="no engine fits 1 devices"):
        best_placement([pair], 1)


@pytest.mark.parametrize("seed", range(20))
def test_the_best_is_that_of_every_count_of_engines(seed):
    draw = random.Random(seed)
    engines = [
        EngineGoodput(*(draw.uniform(0, 9) for _ in range(3)), tensor=draw.choice([1, 2, 4]))
        for _ in range(3)
    ]
    num_devices = draw.choice([4, 7, 8])
    counts = [range(num_devices // engine.devices + 1) for engine in engines]
    goodputs = [0.0]
    for (a, one), (b, other) in itertools.product(enumerate(engines), repeat=2):
        for n, m in itertools.product(counts[a], counts[b]):
            if n * one.devices + m * other.devices <= num_devices:
                goodputs.append(min(n * one.prefill, m * other.decode))
    goodputs += [max(counts[a]) * one.both for a, one in enumerate(engines)]
    assert best_placement(engines, num_devices).goodput == pytest.approx(max(goodputs))


def chunk(start: int, num_tokens: int = 1) -> ScheduledChunk:
    return ScheduledChunk(None, start, num_tokens, samples=True, output_index=0, slot=0)


def test_prefills_cost_a_decode_engine_nothing():
    engine = EngineUnderLoad(deployment(), times(), load())
    free = DecodeTimes(times(), engine.deployment.buckets)
    mixed = StepPlan(decodes=(chunk(9), chunk(7)), prefills=(chunk(0, 20),))
    alone = StepPlan(decodes=mixed.decodes)
    assert free.step(ProgramKey(4, 32), (mixed,)) == times().step(ProgramKey(2, 0), (alone,))
    assert free.step(ProgramKey(0, 32), (StepPlan(prefills=mixed.prefills),)) == 0


def test_goodput_by_role_of_a_simulated_engine():
    """An engine with one duty serves at least as much as one with both."""
    found = goodput_by_role(deployment(), times(), load(), SLO)
    assert found.both <= min(found.prefill, found.decode)
    assert found.devices == 1
    split = best_placement([found], 4)
    assert split.goodput >= 4 * found.both
    one_token = prefill_only(EngineUnderLoad(deployment(), times(), load()))
    assert {a.params.max_tokens for a in one_token.load.arrivals} == {1}
    assert decode_only(one_token).deployment.buckets.max_prefill_tokens == 128


def test_engines_apart_serve_what_the_slower_role_does():
    """Two prefill engines and one that decodes: at their capacity both roles meet the SLO, and at
    the next rate one does not."""
    shared = EngineUnderLoad(deployment(), times(), dataclasses.replace(load(), rate=RATE / 2))
    both = SplitEngines.of(shared, EngineUnderLoad(deployment(), times(), load()), SLO)
    bounds = both.bounds(SLO)
    found = both.capacity(SLO, None, bounds.last_step)
    roles = [role.capacity(SLO, None, bounds.last_step) for role in (both.prefill, both.decode)]
    assert found.step == min(role.step for role in roles)
    assert both.capacity(SLO, found.step, bounds.last_step).step is None
    assert SLO.met(found.values)
    with pytest.raises(
        ConfigError, match="slo has e2e_p50, which disaggregated prefill and decode"
    ):
        SplitEngines.of(shared, shared, Slo.of("e2e_p50=1s"))
    with pytest.raises(ConfigError, match="nothing to decode"):
        SplitEngines.of(shared, prefill_only(shared), SLO)


def test_an_slo_that_no_role_meets():
    slo = Slo.of("ttft_p90=1ms,itl_p90=8ms")
    found = goodput_by_role(deployment(), times(), load(rate=RATE), slo)
    assert found.prefill == found.both == 0
    assert found.decode > 0
