"""The predictor of step times: what it learns, and what it says before it has learnt."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.errors import ProgramMissError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.core.steps.buckets import Buckets, ProgramKey
from jaxserve.core.steps.plan import ScheduledChunk, StepPlan
from jaxserve.scheduler.step_time import StepLoad, StepTime

BUCKETS = Buckets(rows=(1, 4, 8), mixed_rows=(0, 8), prefill_tokens=(32, 64, 128))
BASE_US, PER_TOKEN_US, PER_CONTEXT_US, PER_PAIR_US = 4000, 50, 0.5, 0.02


def true_us(load: StepLoad) -> float:
    tokens = BUCKETS.pick(load.num_decodes, load.prefill_tokens).num_tokens
    linear_us = BASE_US + PER_TOKEN_US * tokens
    return linear_us + PER_CONTEXT_US * load.context_tokens + PER_PAIR_US * load.num_pairs


def random_load(rng: random.Random) -> StepLoad:
    decodes = rng.randint(0, 8)
    load = StepLoad(decodes, sum(rng.randint(1, 5000) for _ in range(decodes)))
    if decodes and rng.random() < 0.3:
        return load
    return load.plus(rng.randint(0, 20_000), rng.randint(1, 128))


loads = st.builds(
    lambda decodes, context, start, tokens: StepLoad(decodes, decodes * context).plus(
        start, tokens
    ),
    st.integers(0, 8),
    st.integers(1, 10_000),
    st.integers(0, 100_000),
    st.integers(1, 128),
)


def chunk_of(start: int, num_tokens: int, **params) -> ScheduledChunk:
    seq = Sequence(0, "r0", 0, [7] * (start + num_tokens), SamplingParams(**params), 0)
    return ScheduledChunk(seq, start, num_tokens, True, 0, 0)


def test_the_load_of_a_plan_counts_what_is_read():
    decodes, prefills = (chunk_of(9, 1), chunk_of(0, 1)), (chunk_of(4, 3),)
    load = StepLoad.of(StepPlan(decodes, prefills))
    assert load == StepLoad(2, 10 + 1, 3, 5 + 6 + 7, lone_stop=7)
    assert StepLoad.of(StepPlan(decodes)).plus(4, 3) == load
    assert StepLoad.of(StepPlan(decodes)).plus(4, 1).plus(5, 2, extends=True) == load


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(),
        StepPlan((chunk_of(9, 1),)),
        StepPlan((chunk_of(9, 1),), (chunk_of(4, 3),)),
        StepPlan((), (chunk_of(4, 3, prompt_logprobs=0),)),
        StepPlan((), (chunk_of(4, 3), chunk_of(0, 8), chunk_of(0, 1, prompt_logprobs=0))),
    ],
)
def test_a_load_picks_the_program_that_the_plan_runs_in(plan):
    assert StepLoad.of(plan).shape == plan.shape


def test_a_program_is_learnt_from_the_dispatches_that_ran_it():
    """In a pipeline a decode behind a prefill runs in the program of both."""
    step_time = StepTime(BUCKETS, num_stages=2)
    prefill, decode = StepLoad().plus(0, 64), StepLoad(1, 9)
    step_time.observe(StepLoad.together([decode, prefill]), 900)
    step_time.observe(decode, 100)
    assert (step_time.predict(decode), step_time.predict(prefill)) == (100, 900)
    step_time.dispatched(prefill)
    assert step_time.predict(StepLoad()) == step_time.predict(decode) == 900
    step_time.dispatched(StepLoad())
    assert (step_time.predict(StepLoad()), step_time.predict(decode)) == (0, 100)


def test_a_ring_program_is_learnt_apart():
    ring = dataclasses.replace(BUCKETS, ring_contexts={ProgramKey(0, 128): 256})
    step_time, lone = StepTime(ring), StepLoad().plus(0, 128)
    step_time.observe(lone, 500)
    step_time.observe(StepLoad().plus(0, 64).plus(0, 64), 900)
    assert step_time.predict(lone) == step_time.predict(StepLoad().plus(128, 128)) == 500
    for other in (StepLoad().plus(129, 128), StepLoad().plus(0, 128, scored=True)):
        assert step_time.predict(other) == 900


def test_it_knows_nothing_before_a_step_of_the_kind_was_seen():
    step_time, decode, prefill = StepTime(BUCKETS), StepLoad(1, 10), StepLoad().plus(0, 32)
    assert step_time.predict(StepLoad()) == 0
    assert step_time.predict(prefill) is step_time.prefill_us(0, 32) is None
    step_time.observe(decode, 700)
    assert step_time.predict(decode) == 700
    assert step_time.predict(prefill) is step_time.prefill_us(0, 32) is None
    step_time.observe(prefill, 900)
    assert step_time.predict(prefill) == 900


def test_a_load_that_no_program_holds_is_refused():
    with pytest.raises(ProgramMissError):
        StepTime(BUCKETS).predict(StepLoad().plus(0, 129))
    with pytest.raises(ProgramMissError):
        StepTime(BUCKETS).observe(StepLoad(9, 9), 1)


def test_a_program_never_run_is_guessed_from_those_that_ran():
    step_time = StepTime(BUCKETS)
    step_time.observe(StepLoad().plus(0, 64), 1000)
    assert step_time.predict(StepLoad().plus(0, 128)) == 2000
    assert step_time.predict(StepLoad().plus(0, 32)) == 1000
    step_time.observe(StepLoad().plus(0, 32), 800)
    assert step_time.predict(StepLoad().plus(0, 128)) == 1400
    step_time.observe(StepLoad(8, 8).plus(0, 128), 1300)
    assert step_time.predict(StepLoad().plus(0, 128)) == 1300


@pytest.mark.parametrize("stalls", [0, 0.05])
def test_it_learns_what_steps_cost_despite_noise_and_stalls(stalls):
    rng, step_time = random.Random(1), StepTime(BUCKETS)
    for _ in range(600):
        load = random_load(rng)
        stall = 10 if rng.random() < stalls else 1
        step_time.observe(load, round(true_us(load) * rng.uniform(0.97, 1.03) * stall))
    errors = []
    for _ in range(200):
        load = random_load(rng)
        errors.append(abs(step_time.predict(load) / true_us(load) - 1))
    assert sorted(errors)[190] < (0.3 if stalls else 0.1)
    assert step_time.us_per_pair == pytest.approx(PER_PAIR_US, rel=0.3)


def test_it_follows_a_machine_that_slows_down():
    rng, step_time = random.Random(2), StepTime(BUCKETS)
    for slower in (1, 5):
        for _ in range(400):
            load = random_load(rng)
            step_time.observe(load, round(slower * true_us(load)))
    loads = [random_load(rng) for _ in range(100)]
    errors = sorted(abs(step_time.predict(load) / true_us(load) / 5 - 1) for load in loads)
    assert errors[95] < 0.15


@settings(deadline=None)
@given(observed=st.lists(st.tuples(loads, st.integers(0, 10_000_000)), max_size=60), load=loads)
def test_predictions_are_sane_whatever_was_observed(observed, load):
    """Also those of an equal history, to the microsecond: hosts must agree on them."""
    step_time, again = StepTime(BUCKETS), StepTime(BUCKETS)
    for seen, us in observed:
        step_time.observe(seen, us)
        again.observe(seen, us)
    assert step_time.us_per_context >= 0 and step_time.us_per_pair >= 0
    us = step_time.predict(load)
    assert us == again.predict(load)
    assert (us is None) == (not observed)
    if us is not None:
        assert 1 <= us < 10**12
        # More of anything takes no less time.
        assert us <= step_time.predict(load._replace(num_pairs=load.num_pairs + 1000))
        assert us <= step_time.predict(load._replace(context_tokens=load.context_tokens + 1000))
        whole = step_time.prefill_us(0, 1000)
        assert whole >= step_time.prefill_us(500, 1000) >= step_time.prefill_us(900, 1000) >= 0
