"""Speculation in simulations: accepted drafts, and what a step with drafts takes and yields."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from round_numbers import DEVICE, WORK
from simulations import of, tiny_config, tiny_trace

from jaxserve.core.errors import ConfigError
from jaxserve.core.events import Collected
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.core.steps.buckets import Buckets, ProgramKey
from jaxserve.core.steps.layer_times import layer_times
from jaxserve.core.steps.plan import DecodeGroup, ScheduledChunk, StepPlan
from jaxserve.core.steps.work import DraftWork
from jaxserve.scheduler.decode_groups import PrefixCost
from jaxserve.simulator.acceptance import DraftAcceptance
from jaxserve.simulator.roofline import Roofline
from jaxserve.simulator.simulation import Arrival, Simulation
from jaxserve.simulator.step_times import LinearTimes, PrefixSharing

TIMES = LinearTimes(base_s=2e-3, token_s=1e-4)


def speculating(rates: tuple[float, ...], drafts: int | str = 3, num_pages: int = 60) -> Simulation:
    speculative = {"num_speculative_tokens": drafts}
    config = tiny_config("sarathi", speculative_config=speculative, max_num_batched_tokens=64)
    limits = config.max_num_seqs, config.max_num_batched_tokens
    buckets = Buckets.from_config(*limits, draft_lengths=config.draft_lengths)
    acceptance = DraftAcceptance(rates, config.seed)
    return Simulation(config, buckets, num_pages, TIMES, acceptance=acceptance, keep_events=True)


def one(output_tokens: int) -> Arrival:
    return Arrival(0, [1] * 8, SamplingParams(max_tokens=output_tokens, ignore_eos=True))


@pytest.mark.parametrize(("rate", "tokens_a_step"), [(1.0, 4), (0.0, 1)])
def test_a_timeline_by_hand(rate, tokens_a_step):
    """A prompt pads to 32 tokens: 5.2 ms. A decode of 1 token and 3 drafts takes 2.4 ms, and yields
    4 tokens if all drafts are accepted, one if none is. The last one has no drafts: 2.1 ms."""
    engine = speculating((rate,))
    engine.run([one(13)])
    (summary,) = engine.metrics.finished()
    steps = [5_200 + 2_400 * (1 + n // tokens_a_step) for n in range(12)]
    if not rate:
        steps[-1] -= 300
    assert summary.token_us == (5_200, *steps)


def test_rates_are_those_of_each_place():
    """Of many decodes with 3 drafts: shares of those that accept one, two and three."""
    acceptance, params = DraftAcceptance((0.8, 0.5, 0.25)), SamplingParams(max_tokens=4)
    seqs = [Sequence(n, str(n), 0, [1], params, arrival_us=0) for n in range(4_000)]
    kept = [acceptance.verified(seq, 5, 3).num_accepted for seq in seqs]
    shares = [sum(k >= place for k in kept) / len(kept) for place in (1, 2, 3)]
    assert shares == pytest.approx([0.8, 0.4, 0.1], abs=0.03)
    assert 1 + sum(kept) / len(kept) == pytest.approx(1 + 0.8 + 0.4 + 0.1, abs=0.05)
    assert acceptance.verified(seqs[0], 5, 3) == acceptance.verified(seqs[0], 5, 3)
    other = dataclasses.replace(acceptance, seed=1)
    assert kept != [other.verified(seq, 5, 3).num_accepted for seq in seqs]
    tree = DraftAcceptance((1.0,), depth=2)
    assert tree.verified(seqs[0], 5, 9) == (9, 2)


def test_a_draft_is_right_however_many_are_verified():
    acceptance, params = DraftAcceptance((0.6,)), SamplingParams(max_tokens=4)
    seq = Sequence(7, "7", 0, [1], params, arrival_us=0)
    for index in range(50):
        most = acceptance.verified(seq, index, 8).num_accepted
        assert [acceptance.verified(seq, index, n).num_accepted for n in range(9)] == [
            min(n, most) for n in range(9)
        ]


@pytest.mark.parametrize("rates", [(), (1.5,), (0.5, -0.1)])
def test_what_is_no_acceptance(rates):
    with pytest.raises(ConfigError, match="draft_acceptance is"):
        DraftAcceptance(rates)


@settings(max_examples=20, deadline=None)
@given(
    rate=st.floats(0, 1),
    drafts=st.sampled_from([1, 3, "auto"]),
    num_pages=st.integers(33, 70),
    seed=st.integers(0, 1000),
)
def test_nothing_is_lost_with_drafts(rate, drafts, num_pages, seed):
    engine = speculating((rate,), drafts, num_pages)
    requests = engine.run(tiny_trace(seed, count=8))
    sequences = [output.seq for request in requests for output in request.sequence_outputs]
    assert all(len(seq.output_token_ids) == seq.params.max_tokens for seq in sequences)
    collected = of(engine.log.records, Collected)
    counts = [record.counts or (1,) * len(record.sequences) for record in collected]
    assert sum(map(sum, counts)) == sum(seq.params.max_tokens for seq in sequences)
    assert engine.core.kv.pool.num_used == 0


def test_the_controller_stops_drafts_that_are_never_accepted():
    """`auto` learns from the same acceptance as in an engine: a drafter that is never right drafts
    less and less, one that always is does not."""
    for rate in (0.0, 1.0):
        engine = speculating((rate,), "auto")
        engine.run([one(118)])
        records = [r for r in of(engine.log.records, Collected) if r.sequences][1:-2]
        drafts = [sum(own.num_tokens for own in record.drafts) for record in records]
        begin, end = (sum(part) for part in (drafts[:10], drafts[-10:]))
        assert end < begin / 2 if rate == 0 else end >= begin


def chunk(start: int, num_drafts: int = 0) -> ScheduledChunk:
    return ScheduledChunk(None, start, 1, True, 0, 0, num_drafts=num_drafts)


def test_decodes_with_drafts_read_their_context_once():
    """10 layers of 1,000 bytes a token at 1e9 bytes/s: a context of 100 tokens takes 1 ms however
    wide the decode; the program is that of its width."""
    times = Roofline(DEVICE, WORK, 0)
    wide = ProgramKey(1, 0, width=4)
    base = times.step(wide, (StepPlan(),))
    assert times.step(wide, (StepPlan((chunk(99, 3),)),)) - base == pytest.approx(1e-3)
    assert base > times.step(ProgramKey(1, 0), (StepPlan(),))


def test_a_drafter_takes_its_passes():
    """A pass of a drafter reads its weights and its context, for each draft; and once more for the
    prompts, if it computes them."""
    each = dataclasses.replace(WORK, windows={None: 1}, layer_weights=10**6, layer_bytes=2 * 10**6)
    plain = Roofline(DEVICE, WORK, 0)
    drafting = Roofline(DEVICE, WORK, 0, drafts=DraftWork(each, always=True, prompts=True))
    drafter = Roofline(DEVICE, each, 0)
    params = SamplingParams(max_tokens=4)
    seq = Sequence(0, "0", 0, [1], params, arrival_us=0, num_speculative_tokens=3)
    alone = StepPlan((chunk(99)._replace(seq=seq),))

    def more(key: ProgramKey, plan: StepPlan) -> float:
        return drafting.step(key, (plan,)) - plain.step(key, (plan,))

    a_pass = drafter.step(ProgramKey(1, 0), (alone,))
    assert more(ProgramKey(1, 0, width=4), alone) == pytest.approx(3 * a_pass)
    assert more(ProgramKey(1, 0), alone) == pytest.approx(a_pass)
    prompts = StepPlan(prefills=(ScheduledChunk(None, 0, 32, True, 0, 0),))
    prefill = ProgramKey(0, 32)
    assert more(prefill, prompts) == pytest.approx(drafter.step(prefill, (prompts,)))


def test_a_shared_prefix_is_read_once():
    """Four decodes at 100 tokens share 5 pages of 16: 80 tokens once in place of four times, but
    for what the merge and the group cost."""
    shared = PrefixSharing(PrefixCost(once=1.0, in_group=0.0, row=2.0, group=10.0), page_size=16)
    decodes = tuple(chunk(99) for _ in range(4))
    together = StepPlan(decodes, decode_groups=(DecodeGroup(0, 4, 5),))
    times = Roofline(DEVICE, WORK, 0, shared=shared)
    saved_s = times.step(ProgramKey(4, 0), (StepPlan(decodes),)) - times.step(
        ProgramKey(4, 0), (together,)
    )
    assert shared.saved(together) == 3 * 80 - 4 * 2 - 10
    assert saved_s == pytest.approx(10 * 1_000 * shared.saved(together) / 1e9)


def test_a_step_in_halves_takes_the_time_of_halves():
    work = dataclasses.replace(WORK, tensor=2)
    key = ProgramKey(0, 1024)
    whole = Roofline(DEVICE, work, 0).step(key, (StepPlan(),))
    halves = Roofline(DEVICE, work, 0, halves={key}).step(key, (StepPlan(),))
    layer = layer_times(DEVICE, work, 1024)
    assert whole - halves == pytest.approx(10 * (layer.whole - layer.halves))
