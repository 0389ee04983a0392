"""What the measured steps compute."""

from __future__ import annotations

import collections

import pytest

from jaxserve.core.settings.config import EngineConfig
from jaxserve.runtime.startup import engine_plan
from jaxserve.runtime.step_measurement import StepMeasurements
from jaxserve.scheduler.step_time import StepLoad


class Recorder:
    """A runner that computes nothing."""

    busy = False

    def __init__(self):
        self.in_flight = collections.deque()
        self.last_tokens, self.plans = [], []

    def register(self, *args):
        pass

    forget = read = register

    def set_last_tokens(self, token_ids):
        self.last_tokens.append(token_ids)

    def pack(self, plan, step_id):
        self.plans.append(plan)

    def dispatch(self, packed, begun_us):
        self.in_flight.append(packed)


def test_tokens_differ_so_that_they_take_different_experts(llama):
    shapes = engine_plan.plan_engine(EngineConfig.of(model=llama.path, **llama.settings())).shapes
    runner = Recorder()
    measured = [found for *_, found in StepMeasurements(shapes, runner).run() if found is not None]
    assert {found.key for found in measured} == {*shapes.buckets.keys()}
    assert len(runner.last_tokens) == len(runner.plans) > len(measured)
    assert all(len({*tokens}) > 1 for tokens in runner.last_tokens)
    chunks = [chunk for plan in runner.plans for chunk in plan.prefills if chunk.num_tokens > 8]
    assert chunks
    for chunk in chunks:
        assert len({*chunk.seq.token_ids(chunk.start, chunk.start + chunk.num_tokens)}) > 4


def test_steps_whose_rounds_differ_are_timed_again_and_a_burst_does_not_count(llama):
    shapes = engine_plan.plan_engine(EngineConfig.of(model=llama.path, **llama.settings())).shapes
    steps = StepMeasurements(shapes, Recorder())
    counts = collections.Counter()
    seconds = {}

    def timed(first, again):
        load = StepLoad.of(first)
        counts[load] += 1
        base = seconds.setdefault(load, 1.0 + len(seconds))
        # One of the first four rounds of one of the steps is three times as slow.
        burst = 3.0 if base == 3.0 and counts[load] == 2 else 1.0
        return [base * burst * jitter for jitter in (0.6, 1.0, 1.4)]

    steps._time = timed
    told = list(steps.run())
    measured = {found.load: found.seconds for *_, found in told if found is not None}
    assert measured.keys() == seconds.keys()
    for load, base in seconds.items():
        assert counts[load] == (12 if base == 3.0 else 4)
        assert measured[load] == pytest.approx(base, rel=0.1 if base == 3.0 else 1e-9)
    assert [done for done, _, found in told if found is None] == list(range(1, counts.total() + 1))
    assert all(done <= total for done, total, _ in told)
