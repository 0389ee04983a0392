"""The scheduler's calls one by one: refusal, order, late tokens, preemption, the ends."""

from __future__ import annotations

import pytest

from jaxserve.core.errors import ConfigError, PromptTooLongError, RequestError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence, SequenceState
from jaxserve.core.steps.plan import ScheduledChunk
from jaxserve.kv.manager import KVManager
from jaxserve.kv.pages import PagePool
from jaxserve.scheduler.scheduler import Scheduler, SchedulerConfig


def make_config(**changes) -> SchedulerConfig:
    settings = {
        "policy": "sarathi",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 36,
        "max_prefill_tokens": 32,
        "max_model_len": 64,
        "min_chunk_tokens": 4,
    }
    return SchedulerConfig(**settings | changes)


def make_scheduler(num_pages: int = 65, page_size: int = 4, **changes) -> Scheduler:
    kv = KVManager(PagePool(num_pages, page_size), prefix_caching=False)
    return Scheduler(make_config(**changes), kv)


def make_sequence(seq_id: int, prompt: int, max_tokens: int | None = 8, **fields) -> Sequence:
    return Sequence(
        seq_id=seq_id,
        request_id=f"r{seq_id}",
        index=0,
        prompt_token_ids=list(range(100, 100 + prompt)),
        params=SamplingParams(max_tokens=max_tokens),
        **{"arrival_us": seq_id} | fields,
        salt=str(seq_id).encode(),
    )


def ids(chunks) -> list[int]:
    return [chunk.seq.seq_id for chunk in chunks]


# Pages


@pytest.mark.parametrize("accepted", [1, 2, 3, 7])
def test_full_pages_are_known_however_many_tokens_a_step_gains(accepted):
    """Also those whose last token is not the last that the step gained."""
    scheduler = make_scheduler()
    seq, page_size = make_sequence(0, prompt=6, max_tokens=30), scheduler.pool.page_size
    scheduler.add(seq)
    table = scheduler.tables[seq.seq_id]
    while seq.num_tokens < 30:
        plan = scheduler.schedule()
        (chunk,) = (*plan.decodes, *plan.prefills)
        if plan.decodes:  # As if it had been of more tokens than one, all of them kept.
            seq.output_token_ids += [7] * (accepted - 1)
            seq.num_computed += accepted - 1
            assert scheduler.kv.extend(table, chunk.start, seq.num_computed)
        assert scheduler.collect(chunk, 7)
        assert len(table.nodes) == seq.num_written // page_size


# Refusals


def test_a_prompt_as_long_as_the_context_is_refused_with_both_numbers():
    scheduler = make_scheduler()
    with pytest.raises(PromptTooLongError, match=r"64 tokens and the context limit is 64.* 63"):
        scheduler.add(make_sequence(0, prompt=64))
    scheduler.add(make_sequence(1, prompt=63))
    assert scheduler.num_waiting == 1


def test_a_request_that_can_never_fit_the_pool_is_refused_and_the_advice_is_right():
    scheduler = make_scheduler(num_pages=1 + 5)
    with pytest.raises(PromptTooLongError, match=r"needs 6 KV pages and the pool has 5.* 21 tok"):
        scheduler.add(make_sequence(0, prompt=10, max_tokens=12))
    assert not scheduler.has_work
    scheduler.add(make_sequence(1, prompt=10, max_tokens=11))
    assert scheduler.has_work


def test_an_empty_prompt_is_refused():
    with pytest.raises(RequestError, match="at least one"):
        make_scheduler().add(make_sequence(0, prompt=0))


def test_max_tokens_is_cut_to_the_context():
    scheduler = make_scheduler()
    for seq_id, wanted in enumerate([None, 1000, 3]):
        seq = make_sequence(seq_id, prompt=60, max_tokens=wanted)
        scheduler.add(seq)
        assert seq.max_tokens == min(4, wanted or 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "fifo"}, "unknown scheduler 'fifo'; one of static, orca, vllm"),
        ({"priority_ageing_us": 0}, "priority_ageing_us is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"watermark": 1.0}, r"watermark is 1\.0"),
        ({"max_prefill_tokens": 3}, "at least min_chunk_tokens, 4"),
        ({"max_num_batched_tokens": 7}, "with max_num_seqs 4 it must be at least 8"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_config(**changes)


# Order


def test_waiting_is_ordered_by_priority_then_arrival_then_id():
    scheduler = make_scheduler()
    for seq_id, priority, arrival_us in [(0, 1, 0), (1, 0, 9), (2, 0, 5), (3, 0, 9), (4, -1, 99)]:
        scheduler.add(make_sequence(seq_id, 2, priority=priority, arrival_us=arrival_us))
    assert [seq.seq_id for seq in scheduler.waiting] == [4, 2, 1, 3, 0]
    assert ids(scheduler.schedule().prefills) == [4, 2, 1, 3]


def test_admission_stops_at_the_first_that_does_not_fit():
    scheduler = make_scheduler(num_pages=1 + 8)
    for seq_id, prompt in enumerate([16, 24, 2]):
        scheduler.add(make_sequence(seq_id, prompt))
    assert ids(scheduler.schedule().prefills) == [0]
    assert [seq.seq_id for seq in scheduler.waiting] == [1, 2]


def test_admission_leaves_the_watermark_free_unless_nothing_runs():
    scheduler = make_scheduler(num_pages=1 + 10, watermark=0.25)
    scheduler.add(make_sequence(0, prompt=4))
    scheduler.add(make_sequence(1, prompt=32))
    assert ids(scheduler.schedule().prefills) == [0], "8 of 9 free pages leave less than 3"
    scheduler.abort(0)
    assert ids(scheduler.schedule().prefills) == [1], "an idle pool is all its own"


# Tokens a step late


def test_a_decode_is_planned_before_the_token_it_feeds_is_known():
    scheduler = make_scheduler()
    seq = make_sequence(0, prompt=5, max_tokens=4)
    scheduler.add(seq)
    (prefill,) = scheduler.schedule().prefills
    assert (prefill.start, prefill.num_tokens, prefill.samples, prefill.output_index) == (
        0,
        5,
        True,
        0,
    )
    (decode,) = scheduler.schedule().decodes
    assert (decode.start, decode.num_tokens, decode.output_index) == (5, 1, 1)
    assert (seq.num_tokens, seq.num_output, seq.remaining) == (7, 2, 1)
    assert seq.output_token_ids == []
    assert scheduler.collect(prefill, 7) and scheduler.collect(decode, 8)
    assert seq.token_ids(0, 7) == [100, 101, 102, 103, 104, 7, 8]
    assert [seq.token_ids(*span) for span in [(1, 3), (3, 6), (5, 7)]] == [
        [101, 102],
        [103, 104, 7],
        [7, 8],
    ]


def test_max_tokens_is_never_passed_and_memory_is_free_before_the_last_token_is_read():
    scheduler = make_scheduler()
    seq = make_sequence(0, prompt=5, max_tokens=2)
    scheduler.add(seq)
    chunks = [*scheduler.schedule().prefills, *scheduler.schedule().decodes]
    assert len(chunks) == 2 and scheduler.pool.num_used == 2
    assert scheduler.schedule().empty
    assert scheduler.pool.num_used == 0 and scheduler.num_running == 0 and scheduler.has_work
    for chunk in chunks:
        assert scheduler.collect(chunk, 1)
    scheduler.finish(seq, "length")
    assert not scheduler.has_work and seq.output_token_ids == [1, 1]


def test_the_surplus_token_after_a_stop_is_dropped():
    scheduler = make_scheduler()
    seq = make_sequence(0, prompt=5)
    scheduler.add(seq)
    (first,), (second,) = scheduler.schedule().prefills, scheduler.schedule().decodes
    assert scheduler.collect(first, 2)
    scheduler.finish(seq, "stop", stop_reason=2)
    assert scheduler.pool.num_used == 0 and not scheduler.has_work
    assert not scheduler.collect(second, 9)
    assert seq.output_token_ids == [2] and seq.num_in_flight == 0
    assert (seq.finish_reason, seq.stop_reason) == ("stop", 2)
    scheduler.finish(seq, "abort")
    assert seq.finish_reason == "stop"


def test_a_slot_returns_with_its_sequence():
    scheduler = make_scheduler(max_num_seqs=2)
    for seq_id in range(3):
        scheduler.add(make_sequence(seq_id, 2))
    plan = scheduler.schedule()
    assert [chunk.slot for chunk in plan.prefills] == [0, 1]
    assert scheduler.abort(0)
    plan = scheduler.schedule()
    assert [(chunk.seq.seq_id, chunk.slot) for chunk in plan.prefills] == [(2, 0)]
    assert [(chunk.seq.seq_id, chunk.slot) for chunk in plan.decodes] == [(1, 1)]


def test_abort_works_in_every_state_and_once():
    scheduler = make_scheduler(max_num_seqs=1)
    for seq_id in range(2):
        scheduler.add(make_sequence(seq_id, 2))
    scheduler.schedule()
    assert scheduler.abort(1) and scheduler.abort(0)
    assert not scheduler.abort(0) and not scheduler.abort(77)
    assert not scheduler.has_work and scheduler.schedule().empty
    assert scheduler.pool.num_used == 0


# Preemption


def test_a_victim_keeps_the_token_in_flight_and_returns_only_when_it_is_known():
    scheduler = make_scheduler(num_pages=1 + 4)
    old, young = make_sequence(0, 4, max_tokens=12), make_sequence(1, 4, max_tokens=12)
    scheduler.add(old)
    scheduler.add(young)
    first = scheduler.schedule()
    assert ids(first.prefills) == [0, 1]
    steps = [scheduler.schedule() for _ in range(4)]  # Both fill their second page: none is free.
    assert all(ids(step.decodes) == [0, 1] for step in steps)

    plan = scheduler.schedule()
    assert ids(plan.decodes) == [0] and plan.preempted == (young,)
    assert young.state is SequenceState.WAITING and young.num_in_flight == 5
    pages = scheduler.tables[young.seq_id].pages
    assert (pages, young.slot, young.num_computed) == ([], None, 0)
    scheduler.abort(0)
    assert scheduler.schedule().empty, "its tokens are not known yet"

    for token_id, chunk in enumerate([first.prefills[1], *(step.decodes[1] for step in steps)]):
        assert scheduler.collect(chunk, token_id)
    (again,) = scheduler.schedule().prefills
    assert again.seq is young and (again.start, again.num_tokens) == (0, 9)
    assert again.samples and again.output_index == 5
    assert young.num_preemptions == 1


def test_a_victim_does_not_return_into_a_pool_with_no_page_to_spare():
    scheduler = make_scheduler(num_pages=1 + 4)
    old, young = make_sequence(0, 4, max_tokens=12), make_sequence(1, 4, max_tokens=12)
    scheduler.add(old)
    scheduler.add(young)
    pending: list[ScheduledChunk] = []
    while not young.num_preemptions:
        plan = scheduler.schedule()
        for chunk in pending:
            scheduler.collect(chunk, 0)
        pending = [*plan.decodes, *plan.prefills]
    while old.num_output < 12:
        plan = scheduler.schedule()
        assert ids(plan.decodes) == [0] and not plan.prefills
        for chunk in pending:
            scheduler.collect(chunk, 0)
        pending = list(plan.decodes)
    assert ids(scheduler.schedule().prefills) == [1]


def test_a_sequence_preempted_half_way_through_its_prompt_starts_again():
    # Two prompt tokens a step; the first sequence needs the second one's pages before it is done.
    scheduler = make_scheduler(
        num_pages=1 + 7,
        max_num_seqs=2,
        max_num_batched_tokens=4,
        max_prefill_tokens=2,
        min_chunk_tokens=2,
    )
    scheduler.add(make_sequence(0, prompt=8, max_tokens=9))
    scheduler.add(make_sequence(1, prompt=14, max_tokens=2))
    spans, pending = [], []
    while scheduler.has_work:
        plan = scheduler.schedule()
        for chunk in pending:
            seq = chunk.seq
            if chunk.samples:
                assert scheduler.collect(chunk, 50 + chunk.output_index)
            if len(seq.output_token_ids) == seq.max_tokens:
                scheduler.finish(seq, "length")
        pending = [*plan.decodes, *plan.prefills]
        spans += [(c.start, c.num_tokens, c.samples) for c in pending if c.seq.seq_id == 1]
        second = plan.preempted[0] if plan.preempted else None
        if second is not None:
            assert second.seq_id == 1 and 0 < spans[-1][0] < 12
            spans.clear()
    assert [start for start, _, _ in spans] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert [samples for _, _, samples in spans] == [False] * 6 + [True] * 2
    assert scheduler.pool.num_used == 0


def test_the_victim_is_the_least_urgent_not_the_last_admitted():
    scheduler = make_scheduler(num_pages=1 + 5)
    scheduler.add(make_sequence(0, 4, max_tokens=12, priority=1))
    scheduler.schedule()
    scheduler.add(make_sequence(1, 4, max_tokens=12, priority=0))
    victims = []
    while not victims:
        victims = [seq.seq_id for seq in scheduler.schedule().preempted]
    assert victims == [0]
