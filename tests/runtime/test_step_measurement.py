"""What the measured steps compute."""

from __future__ import annotations

import collections

from jaxserve.core.settings.config import EngineConfig
from jaxserve.runtime.startup import engine_plan
from jaxserve.runtime.step_measurement import StepMeasurements


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


def test_the_fastest_round_of_a_step_counts(llama):
    """Other processes slow down whole rounds: there are more until two are as fast."""
    shapes = engine_plan.plan_engine(EngineConfig.of(model=llama.path, **llama.settings())).shapes
    steps = StepMeasurements(shapes, Recorder())
    counts = collections.Counter()
    slow = [3.0, 2.0, 1.3, 1.1, 1.7, 1.0, 1.02]  # The third point's rounds; the others are quiet.

    def timed(first, again):
        counts[id(first)] += 1
        place = list(counts).index(id(first))
        factor = slow[counts[id(first)] - 1] if place == 2 else 1.0
        return [(1 + place) * factor * jitter for jitter in (0.6, 1.0, 1.4)]

    steps._time = timed
    told = list(steps.run())
    measured = [found.seconds for *_, found in told if found is not None]
    assert measured == [1.0 + place for place in range(len(measured))]
    assert list(counts.values()) == [4, 4, 7, *[4] * (len(measured) - 3)]
    assert [done for done, _, found in told if found is None] == list(range(1, counts.total() + 1))
    assert all(done <= total for done, total, _ in told)
