"""What the measured steps compute."""

from __future__ import annotations

import collections

from jaxserve.core.config import EngineConfig
from jaxserve.runtime.planning import engine_plan
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
    shapes = engine_plan.plan(EngineConfig.of(model=llama.path, **llama.settings())).shapes
    runner = Recorder()
    measured = [found for *_, found in StepMeasurements(shapes, runner).run() if found is not None]
    assert {found.key for found in measured} == {*shapes.buckets.keys()}
    assert len(runner.last_tokens) == len(runner.plans) > len(measured)
    assert all(len({*tokens}) > 1 for tokens in runner.last_tokens)
    chunks = [chunk for plan in runner.plans for chunk in plan.prefills if chunk.num_tokens > 8]
    assert chunks
    for chunk in chunks:
        assert len({*chunk.seq.token_ids(chunk.start, chunk.start + chunk.num_tokens)}) > 4
