"""Modelled step times against arithmetic by hand."""

from __future__ import annotations

import dataclasses

import pytest
from round_numbers import DEVICE, WORK

from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.core.steps.plan import ScheduledChunk, StepPlan
from jaxserve.core.steps.work import ChunkWork, pairs_seen
from jaxserve.simulator.roofline import Roofline
from jaxserve.simulator.utilization import CountedTimes

SEQ = Sequence(0, "0", 0, [0], SamplingParams(), arrival_us=0)


def chunk(start: int, num_tokens: int, samples: bool = True) -> ScheduledChunk:
    return ScheduledChunk(SEQ, start, num_tokens, samples, 0, 0)


def test_a_decode_reads_weights_and_its_context():
    plan = StepPlan(decodes=(chunk(4999, 1), chunk(9999, 1)))
    weights_s = (20e6 + 4 * 10 * 2000 * 2) / 1e9 + 2e6 / 1e9
    attention_s = 15_000 * 500 * 2 * 10 / 1e9
    found = Roofline(DEVICE, WORK, 0).step(ProgramKey(2, 0), [plan])
    assert found == pytest.approx(weights_s + attention_s + 11e-5)


def test_a_prefill_computes_its_padding_too():
    plan = StepPlan(prefills=(chunk(1000, 900),))
    layers_s = 2 * 10e6 * 1024 / 1e12
    reads_s = (20e6 + 4 * 10 * 2000 * 1024) / 1e9
    assert reads_s > layers_s  # These devices are short of bandwidth, even here.
    pairs = 1900 * 1901 // 2 - 1000 * 1001 // 2
    attention_s = max(4 * 1000 * 10 * pairs / 1e12, 500 * 2 * 10 * (900 + 1001) / 1e9)
    found = Roofline(DEVICE, WORK, 0).step(ProgramKey(0, 1024), [plan])
    assert found == pytest.approx(reads_s + 2e6 / 1e9 + attention_s + 11e-5)


def test_a_token_takes_its_experts_alone():
    """Two of eight experts: a token reads a quarter of them, and of many tokens each expert has
    some."""
    experts = {"expert_weights": 8_000_000, "expert_bytes": 16_000_000, "expert_share": 2 / 8}
    mixture = dataclasses.replace(WORK, **experts)
    assert mixture.weights_per_token == 12e6
    assert mixture.weight_bytes(1) == 20e6 + 4e6
    assert mixture.weight_bytes(2) == 20e6 + 16e6 * (1 - 0.75**2)
    plan, key = StepPlan(decodes=(chunk(0, 1),)), ProgramKey(1, 0)
    steps = [Roofline(DEVICE, work, 0).step(key, [plan]) for work in (WORK, mixture)]
    assert steps[1] - steps[0] == pytest.approx(4e6 / 1e9)
    padded = Roofline(DEVICE, mixture, 0).step(ProgramKey(4, 0), [plan])
    without = Roofline(DEVICE, WORK, 0).step(ProgramKey(4, 0), [plan])
    assert padded - without == pytest.approx(4e6 / 1e9)  # Padding takes none.
    counted = CountedTimes(Roofline(DEVICE, mixture, 0), mixture)
    counted.step(ProgramKey(0, 1024), [StepPlan(prefills=(chunk(0, 900, samples=False),))])
    assert counted.num_bytes == pytest.approx(20e6 + 16e6 + 2e6 + 500 * 2 * 10 * 900)


def test_a_chunk_attends_to_itself_by_keys_and_values_of_heads():
    """In programs that are wide enough for it, and to what is before it as before."""
    chunks = ChunkWork(least=512, query_size=300, weights=5000)
    work = dataclasses.replace(WORK, chunks=chunks)
    plan = StepPlan(prefills=(chunk(1000, 900), chunk(0, 100)))
    own = 900 * 901 // 2 + 100 * 101 // 2
    flops = 10 * (4 * 1000 * 900 * 1000 + 4 * 300 * own + 2 * 5000 * 1000)
    for width, expected in ((1024, flops), (256, 10 * 4 * 1000 * (own + 900 * 1000))):
        counted = CountedTimes(Roofline(DEVICE, work, 0), work)
        counted.step(ProgramKey(0, width), [plan])
        outside = 2 * 10e6 * 1000 + 2 * 2 * 1e6
        assert counted.flops == outside + expected
    slow = dataclasses.replace(DEVICE, flops={"bfloat16": 1e9})
    seconds = [Roofline(slow, of, 0).step(ProgramKey(0, 1024), [plan]) for of in (WORK, work)]
    saved = 10 * (4 * 700 * own - 2 * 5000 * 1000)
    assert seconds[0] - seconds[1] == pytest.approx(saved / 1e9)


def test_messages_of_a_mesh():
    plan, key = StepPlan(decodes=(chunk(0, 1),)), ProgramKey(1, 0)
    alone = Roofline(DEVICE, WORK, 0).step(key, [plan])

    def more(**sizes: int) -> float:
        return Roofline(DEVICE, dataclasses.replace(WORK, **sizes), 0).step(key, [plan]) - alone

    assert more(tensor=4) == pytest.approx(2 * 10 * (1e-3 + 2 * 3 / 4 * 2000 / 1e8))
    assert more(stages=2) == pytest.approx(1e-3 + 2000 / 1e8)
    both = dataclasses.replace(DEVICE, both_ways=True)
    torus = Roofline(both, dataclasses.replace(WORK, stages=2), 0).step(key, [plan]) - alone
    assert torus == pytest.approx(1e-3 + 1000 / 1e8)


def test_a_pipeline_waits_for_its_slowest_stage():
    short, long = (StepPlan(decodes=(chunk(start, 1),)) for start in (9, 99_999))
    times, key = Roofline(DEVICE, WORK, 0), ProgramKey(1, 0)
    assert times.step(key, [short, long, StepPlan()]) == times.step(key, [long])


@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_pairs_are_those_that_a_mask_leaves(window):
    for start, stop in ((0, 1), (0, 20), (3, 9), (6, 8), (10, 40)):
        seen = [min(position + 1, window or position + 1) for position in range(start, stop)]
        assert pairs_seen(start, stop, window) == sum(seen)


def test_a_copy_reads_and_writes():
    assert Roofline(DEVICE, WORK, page_bytes=1000).copy(5) == pytest.approx(2 * 5000 / 1e9)


def test_what_steps_need_is_counted_without_padding():
    counted = CountedTimes(Roofline(DEVICE, WORK, 0), WORK)
    prefill = StepPlan(prefills=(chunk(0, 10, samples=False),))
    decode = StepPlan(decodes=(chunk(10, 1),))
    for plan in (prefill, decode):
        counted.step(ProgramKey(4, 1024), [plan])
    assert (counted.num_steps, counted.num_tokens) == (2, 11)
    assert counted.flops == 2 * 10e6 * 11 + 2 * 1e6 + 4 * 1000 * 10 * (55 + 11)
    assert counted.num_bytes == 2 * 22e6 + 500 * 2 * 10 * (10 + 11)
