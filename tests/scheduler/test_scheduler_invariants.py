"""What holds after every step of every policy, whatever arrives, ends or is aborted."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import linear_times, simulate
from workloads import Job

from jaxserve.core.sequence import Sequence, SequenceState
from jaxserve.core.steps.buckets import Buckets
from jaxserve.core.steps.plan import StepPlan
from jaxserve.kv.pages import PagePool
from jaxserve.scheduler.policies import POLICIES
from jaxserve.scheduler.scheduler import Scheduler, SchedulerConfig
from jaxserve.scheduler.step_time import StepLoad

CONTEXT = 80

jobs_strategy = st.lists(
    st.builds(
        Job,
        arrival_us=st.integers(0, 200),
        prompt_tokens=st.integers(1, 50),
        output_tokens=st.integers(1, 20),
        max_tokens=st.one_of(st.none(), st.integers(1, 20)),
        priority=st.integers(0, 2),
        abort_us=st.one_of(st.none(), st.none(), st.integers(200, 1500)),
    ),
    min_size=1,
    max_size=12,
)


@st.composite
def configs(draw: st.DrawFn, policy: str) -> SchedulerConfig:
    rows, floor = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    budget = rows + floor + draw(st.integers(0, 40))
    max_prefill = draw(st.one_of(st.just(budget), st.integers(floor, budget)))
    timed = {}
    if POLICIES[policy].chunk == "timed":
        sizes = sorted({*draw(st.sets(st.integers(1, max_prefill), max_size=4)), max_prefill})
        timed = {
            "target_step_us": draw(st.integers(1, 60)),
            "buckets": Buckets(tuple(range(1, rows + 1)), (0, rows), tuple(sizes)),
        }
    return SchedulerConfig(
        policy=policy,
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        max_prefill_tokens=max_prefill,
        max_model_len=CONTEXT,
        **timed,
        watermark=draw(st.sampled_from([0.0, 0.01, 0.3])),
        min_chunk_tokens=floor,
        priority_ageing_us=draw(st.sampled_from([None, 50])),
    )


def limit_of(job: Job) -> int:
    """Tokens the job may generate."""
    room = CONTEXT - job.prompt_tokens
    return room if job.max_tokens is None else min(job.max_tokens, room)


@st.composite
def pools(draw: st.DrawFn, jobs: list[Job]) -> PagePool:
    """From the smallest pool that holds the largest job alone upwards."""
    size = draw(st.integers(1, 9))
    largest = max(-(-(job.prompt_tokens + limit_of(job) - 1) // size) for job in jobs)
    return PagePool(1 + largest + draw(st.one_of(st.integers(0, 12), st.just(500))), size)


def check_limits(scheduler: Scheduler, plan: StepPlan) -> None:
    config = scheduler.config
    assert plan.num_tokens <= config.max_num_batched_tokens
    assert plan.num_prefill_tokens <= config.max_prefill_tokens
    assert len(plan.decodes) <= len(scheduler.running) <= config.max_num_seqs
    if scheduler.policy.prefill == "alone":
        assert not (plan.decodes and plan.prefills)


def pages_of(scheduler: Scheduler, seq: Sequence) -> list[int]:
    return scheduler.tables[seq.seq_id].pages


def check_pages(scheduler: Scheduler, plan: StepPlan) -> None:
    pool = scheduler.pool
    held = [page for seq in scheduler.running for page in pages_of(scheduler, seq)]
    assert len(set(held)) == len(held) == pool.num_used
    assert 0 not in held
    for seq in scheduler.running:
        needed = max(seq.num_computed, seq.prefill_end)
        if scheduler.policy.pages == "reserve":
            needed = seq.kv_limit
        assert len(pages_of(scheduler, seq)) == pool.pages_for(needed)
    for seq in scheduler.waiting:
        assert not pages_of(scheduler, seq) and seq.slot is None and seq.num_computed == 0
    written = [
        (chunk.pages[position // pool.page_size], position % pool.page_size)
        for chunk in (*plan.decodes, *plan.prefills)
        for position in range(chunk.start, chunk.start + chunk.num_tokens)
    ]
    assert len(set(written)) == len(written)


def check_chunks(scheduler: Scheduler, plan: StepPlan) -> None:
    chunks = (*plan.decodes, *plan.prefills)
    assert len({chunk.seq.seq_id for chunk in chunks}) == len(chunks)
    slots = [seq.slot for seq in scheduler.running]
    assert len(set(slots)) == len(slots)
    assert set(slots) <= set(range(scheduler.config.max_num_seqs))
    for chunk in chunks:
        seq = chunk.seq
        end = chunk.start + chunk.num_tokens
        assert chunk.slot == seq.slot
        assert end == seq.num_computed
        assert chunk.output_index < seq.max_tokens
        if chunk.samples:
            assert end == seq.num_tokens - 1 == seq.num_prompt + chunk.output_index
        else:
            assert end < seq.num_tokens
    for chunk in plan.decodes:
        assert chunk.num_tokens == 1 and chunk.samples
    for chunk in plan.prefills:
        # Nothing of the sequence is in flight but what this very chunk samples.
        assert chunk.seq.num_in_flight == chunk.samples
        assert chunk.start + chunk.num_tokens <= chunk.seq.num_tokens - chunk.seq.num_in_flight
        if not chunk.samples and scheduler.policy.chunk != "exact":
            assert chunk.num_tokens >= scheduler.config.min_chunk_tokens


def prefilled(seq: Sequence) -> bool:
    return seq.num_computed >= seq.prefill_end


def check_progress(scheduler: Scheduler, plan: StepPlan) -> None:
    planned = {chunk.seq.seq_id for chunk in (*plan.decodes, *plan.prefills)}
    if scheduler.policy.prefill == "mixed":
        # Stall-free: every sequence that can decode does, or has just been preempted.
        assert {seq.seq_id for seq in scheduler.running if prefilled(seq)} <= planned
        if any(not prefilled(seq) for seq in scheduler.running):
            assert plan.prefills
        if scheduler.running and scheduler.policy.chunk != "timed":
            assert scheduler.running[0].seq_id in planned
    elif any(not prefilled(seq) for seq in scheduler.running):
        assert plan.prefills
    if scheduler.policy.pages == "reserve":
        assert not plan.preempted
    assert scheduler.running == sorted(scheduler.running, key=lambda seq: seq.order)
    if scheduler.policy.chunk == "timed":
        return
    # Within a level none overtakes: those that run arrived before all that wait.
    for first in scheduler.running:
        for second in scheduler.waiting:
            assert first.priority != second.priority or first.order < second.order
    # In all levels those admitted now go before those that still wait.
    for seq in admitted(scheduler, plan):
        assert all(seq.order < other.order for other in scheduler.waiting)


def admitted(scheduler: Scheduler, plan: StepPlan) -> list[Sequence]:
    """Those that join by this step; a batch is formed once for several."""
    if not scheduler.policy.joins:
        return []
    return [chunk.seq for chunk in plan.prefills if not chunk.start]


def check_strict(scheduler: Scheduler, plan: StepPlan) -> None:
    """No level takes anything from a better one."""
    for victim in plan.preempted:
        if victim.slot is None and not victim.finished:
            assert all(seq.priority <= victim.priority for seq in scheduler.running)
    if scheduler.policy.chunk == "timed":
        return  # A long prefill may be passed over for one of a worse level.
    # Those that get no tokens now are of no better level than those that join.
    planned = {chunk.seq.seq_id for chunk in plan.prefills}
    idle = [seq for seq in scheduler.running if not prefilled(seq) and seq.seq_id not in planned]
    for seq in admitted(scheduler, plan):
        assert all(seq.priority <= other.priority for other in (*idle, *scheduler.waiting))


def check_work_conserving(scheduler: Scheduler, plan: StepPlan) -> None:
    """Exact fill: a step below the budget has nothing that it could add."""
    config, pool = scheduler.config, scheduler.pool
    most = min(config.max_num_batched_tokens, len(plan.decodes) + config.max_prefill_tokens)
    if plan.num_tokens == most:
        return
    assert all(prefilled(seq) for seq in scheduler.running)
    if scheduler.waiting:
        head: Sequence = next(iter(scheduler.waiting))
        rows_full = scheduler.num_running == config.max_num_seqs
        spare = pool.num_free - pool.pages_for(head.num_tokens)
        assert rows_full or head.num_in_flight or spare < max(1, config.watermark * pool.capacity)


def check_time(scheduler: Scheduler, plan: StepPlan) -> None:
    """Timed chunks: a step is predicted to be in time, or has the one smallest chunk."""
    config, predicted_us = scheduler.config, scheduler.step_time.predict(StepLoad.of(plan))
    if plan.prefills and (predicted_us is None or predicted_us > config.target_step_us):
        (chunk,) = plan.prefills
        smallest = max(config.buckets.prefill_tokens[0], config.min_chunk_tokens)
        assert chunk.num_tokens <= smallest


def check_states(scheduler: Scheduler, plan: StepPlan) -> None:
    """A sequence's state says in which queue it is, and what it holds."""
    running = (SequenceState.ADMITTED, SequenceState.RUNNING, SequenceState.DRAINING)
    for seq in scheduler.waiting:
        assert seq.state is SequenceState.WAITING
    for seq in scheduler.running:
        assert seq.state in running and seq.slot is not None
        assert (seq.state is SequenceState.ADMITTED) <= (not seq.num_in_flight)
    for chunk in (*plan.decodes, *plan.prefills):
        assert chunk.seq.started
        assert chunk.seq.state in (SequenceState.RUNNING, SequenceState.DRAINING)
    for seq in plan.preempted:
        assert seq.started and not seq.finished


def check(scheduler: Scheduler, plan: StepPlan) -> None:
    check_limits(scheduler, plan)
    check_states(scheduler, plan)
    check_pages(scheduler, plan)
    check_chunks(scheduler, plan)
    check_progress(scheduler, plan)
    if scheduler.config.priority_ageing_us is None:
        check_strict(scheduler, plan)
    if scheduler.policy.chunk == "exact":
        check_work_conserving(scheduler, plan)
    elif scheduler.policy.chunk == "timed":
        check_time(scheduler, plan)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None)
@given(jobs=jobs_strategy, data=st.data())
def test_every_step_is_sound_and_every_sequence_ends_once(policy, jobs, data):
    config = data.draw(configs(policy))
    pool = data.draw(pools(jobs))
    run = simulate(jobs, config, pool, linear_times(1, 1), on_step=check)

    assert pool.num_used == 0
    for job, seq in zip(jobs, run.sequences):
        whole = min(job.output_tokens, limit_of(job))
        assert seq.finished and seq.slot is None
        if seq.finish_reason == "abort":
            assert job.abort_us is not None
            assert seq.output_token_ids == list(range(len(seq.output_token_ids)))
            assert len(seq.output_token_ids) < whole
        else:
            assert seq.output_token_ids == list(range(whole))
            stopped = job.output_tokens <= limit_of(job)
            assert seq.finish_reason == ("stop" if stopped else "length")


@pytest.mark.parametrize("prefill", [3, 16])
@pytest.mark.parametrize("policy", ["vllm", "sarathi", "splitfuse"])
def test_a_pool_that_is_too_small_preempts_and_loses_nothing(policy, prefill):
    jobs = [Job(0, 5, 12, max_tokens=12) for _ in range(6)]
    # A small prefill splits what is recomputed among the generated tokens as well.
    config = SchedulerConfig(policy, 4, 4 + prefill, prefill, CONTEXT, min_chunk_tokens=3)
    preempted, events = Counter(), defaultdict(list)

    def watch(scheduler: Scheduler, plan: StepPlan) -> None:
        check(scheduler, plan)
        preempted.update(seq.seq_id for seq in plan.preempted)
        for seq in plan.preempted:
            events[seq.seq_id].append("preempted")
        for seq in plan.resumed:
            events[seq.seq_id].append("resumed")
        for chunk in plan.admitted:
            events[chunk.seq.seq_id].append("admitted")

    pool = PagePool(1 + 6, 4)
    run = simulate(jobs, config, pool, linear_times(1, 1), on_step=watch)
    assert preempted.total() == run.num_preemptions > 0
    assert preempted[0] == 0  # The oldest is never the victim.
    for seq in run.sequences:
        expected = ["admitted", *["preempted", "resumed"] * preempted[seq.seq_id]]
        assert events[seq.seq_id] == expected
    assert [seq.output_token_ids for seq in run.sequences] == [list(range(12))] * len(jobs)
