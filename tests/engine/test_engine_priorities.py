"""Who runs first: priorities that change at any time, and tenants that share an engine."""

from __future__ import annotations

import dataclasses
import random

import pytest
from kv_engines import Preempter, token_ids
from tiny_engines import LONGEST, MAX_SEQS, PROMPT_LENGTHS, Arrival, assert_idle, drive

from jaxserve.core.errors import RequestError
from jaxserve.core.events import Admitted, Finished, Preempted
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence, SequenceState
from jaxserve.kv.invariants import check_invariants
from jaxserve.kv.manager import KVManager
from jaxserve.kv.pages import PagePool
from jaxserve.scheduler.config import SchedulerConfig
from jaxserve.scheduler.policies import POLICIES
from jaxserve.scheduler.scheduler import Scheduler

SEEDED = SamplingParams(temperature=0.8, seed=5, max_tokens=LONGEST, ignore_eos=True)
SHORT = dataclasses.replace(SEEDED, max_tokens=4)
LEVEL_US = 30_000_000
"""What a level of priority is worth where it ages."""
GROWING = [name for name, policy in POLICIES.items() if policy.pages == "grow"]


@pytest.fixture
def engine(kv_llm_for):
    engine = kv_llm_for(host=12, disk=64, preemption="swap").engine
    yield engine
    assert_idle(engine)


def records(engine, kind, work):
    """What `work` returns, and the records of a kind that it logged."""
    first = len(engine.log.records)
    result = work()
    return result, [record for record in engine.log.records[first:] if isinstance(record, kind)]


def check(alone, arrivals, outputs):
    for arrival, output in zip(arrivals, outputs, strict=True):
        assert token_ids(output) == alone.tokens(arrival.prompt, arrival.params)


def prompt_of(llama, length):
    return llama.prompts[PROMPT_LENGTHS.index(length)]


# Displacement


@pytest.mark.parametrize("scheduler", GROWING)
@pytest.mark.parametrize(("length", "count"), [(15, MAX_SEQS), (60, 2)], ids=["slots", "pages"])
def test_an_urgent_request_preempts_the_last_of_the_others(
    llama, alone, kv_llm_for, scheduler, length, count
):
    """Be it slots that are short, or pages."""
    engine = kv_llm_for(host=64, preemption="swap", scheduler=scheduler).engine
    prompt = prompt_of(llama, length)
    usual = [Arrival([3 + i, *prompt[1:]], SEEDED, 0, priority=1) for i in range(count)]
    urgent = Arrival(prompt_of(llama, 33), SHORT, 8)
    arrivals = [*usual, urgent]
    outputs, ended = records(engine, (Finished, Preempted), lambda: drive(engine, arrivals))
    check(alone, arrivals, outputs)
    assert isinstance(ended[0], Preempted)
    finished = [record.sequence for record in ended if isinstance(record, Finished)]
    assert finished[0] == max(finished), "the urgent one came last and ends first"


@pytest.mark.parametrize("scheduler", sorted(set(POLICIES) - set(GROWING)))
def test_a_policy_that_reserves_pages_never_preempts(llama, alone, kv_llm_for, scheduler):
    engine = kv_llm_for(host=64, preemption="swap", scheduler=scheduler).engine
    usual = [Arrival(prompt_of(llama, 15), SEEDED, 0, priority=5) for _ in range(MAX_SEQS)]
    arrivals = [*usual, Arrival(prompt_of(llama, 33), SHORT, 8)]
    outputs, preempted = records(engine, Preempted, lambda: drive(engine, arrivals))
    check(alone, arrivals, outputs)
    assert not preempted


def test_equal_priorities_preempt_nothing(llama, alone, engine):
    usual = [Arrival(prompt_of(llama, 15), SHORT, 0, priority=1) for _ in range(MAX_SEQS)]
    arrivals = [*usual, Arrival(prompt_of(llama, 17), SHORT, 2, priority=1)]
    outputs, preempted = records(engine, Preempted, lambda: drive(engine, arrivals))
    check(alone, arrivals, outputs)
    assert not preempted


def test_a_request_made_urgent_overtakes(llama, alone, engine):
    """First in the queue, then past those that run."""
    last = f"{2 * MAX_SEQS}"
    for number in range(2 * MAX_SEQS):
        engine.add(f"{number}", prompt_of(llama, 15), SEEDED, priority=1)
    engine.add(last, prompt_of(llama, 15), SHORT, priority=1)
    for _ in range(6):
        engine.step()
    assert engine.set_priority(last, 0)
    ended = []
    while engine.has_work:
        ended += [request for request in engine.step() if request.finished]
    assert ended[0].request_id == last
    for request in ended:
        assert token_ids(engine.output(request)) == alone.tokens(
            prompt_of(llama, 15), request.params
        )
    assert not engine.set_priority(last, 0), "it has ended"


@pytest.mark.parametrize("preempts", [False, True])
def test_priorities_that_flap(llama, alone, engine, preempts):
    chance = random.Random(4)
    arrivals = [
        Arrival(prompt, SEEDED, 2 * step, chance.randint(-2, 2))
        for step, prompt in enumerate(llama.prompts)
    ]
    arrivals.append(Arrival(llama.prompts[8], dataclasses.replace(SHORT, n=3), 4))
    preempter = Preempter(engine, evicts=True, share=0.2)

    def between():
        for request_id in list(engine._requests):
            if chance.random() < 0.5:
                assert engine.set_priority(request_id, chance.randint(-3, 3))
        if preempts:
            preempter()  # Of which the log is not told.
        else:
            assert 0 <= engine.get_metrics()["vllm:num_requests_running"].value <= MAX_SEQS

    outputs, preempted = records(engine, Preempted, lambda: drive(engine, arrivals, between))
    check(alone, arrivals, outputs)
    assert len(preempted) > 3
    for name in ("running", "waiting"):
        assert engine.get_metrics()[f"vllm:num_requests_{name}"].value == 0


@pytest.mark.parametrize("priority", ["high", 1.5, None, True, [0]])
def test_what_is_no_priority_is_refused_and_changes_nothing(llama, alone, engine, priority):
    request = engine.add("a", prompt_of(llama, 15), SHORT)
    with pytest.raises(RequestError, match="must be an integer"):
        engine.set_priority("a", priority)
    while engine.has_work:
        engine.step()
    assert token_ids(engine.output(request)) == alone.tokens(prompt_of(llama, 15), SHORT)


# Levels, on a virtual clock


def make_scheduler(num_pages=21, **changes):
    config = SchedulerConfig(
        policy="sarathi",
        max_num_seqs=2,
        max_num_batched_tokens=34,
        max_prefill_tokens=32,
        max_model_len=64,
        min_chunk_tokens=4,
        **changes,
    )
    return Scheduler(config, KVManager(PagePool(num_pages, 4)))


def make_sequence(seq_id, arrival_us, priority, prompt=10, max_tokens=6):
    return Sequence(
        seq_id=seq_id,
        request_id=f"r{seq_id}",
        index=0,
        prompt_token_ids=list(range(100 * seq_id, 100 * seq_id + prompt)),
        params=SamplingParams(max_tokens=max_tokens),
        arrival_us=arrival_us,
        priority=priority,
    )


def step(scheduler):
    plan = scheduler.schedule()
    check_invariants(scheduler.kv, scheduler.tables.values())
    for chunk in (*plan.decodes, *plan.prefills):
        if chunk.samples:
            scheduler.collect(chunk, 7)
            if chunk.seq.num_output == chunk.seq.max_tokens:
                scheduler.finish(chunk.seq, "length")
    return plan


def test_strict_levels_starve_the_worse_as_long_as_better_ones_come():
    scheduler, patient = make_scheduler(), make_sequence(0, 0, priority=1)
    scheduler.add(make_sequence(1, 0, priority=0))
    scheduler.add(patient)
    for seq_id in range(2, 400):
        scheduler.add(make_sequence(seq_id, 10**9 * seq_id, priority=0))
        step(scheduler)
    assert patient.num_output == 0
    while scheduler.has_work:
        step(scheduler)
        if patient.num_output:
            assert not any(seq.priority < 1 for seq in scheduler.waiting)
    assert patient.finish_reason == "length"


def test_strict_levels_are_served_in_order_whatever_they_arrived_in():
    """Ten levels at once, the best last: each ends before a worse one gains a token."""
    scheduler, ended = make_scheduler(), []
    sequences = [make_sequence(i, i, priority=-i, prompt=30, max_tokens=9) for i in range(10)]
    for seq in sequences:
        scheduler.add(seq)
    while scheduler.has_work:
        step(scheduler)
        ended += [seq.seq_id for seq in sequences if seq.finished and seq.seq_id not in ended]
    assert ended == list(reversed(range(10)))


@pytest.mark.parametrize("ages", [False, True])
def test_a_better_level_prefills_before_a_prompt_in_progress(ages):
    """There are slots and pages for both, so none is displaced; tokens of a step are short."""
    scheduler = make_scheduler(num_pages=41, priority_ageing_us=LEVEL_US if ages else None)
    long = make_sequence(0, 0, priority=1, prompt=60, max_tokens=2)
    scheduler.add(long)
    assert [chunk.num_tokens for chunk in step(scheduler).prefills] == [32]
    # It came so late that with ageing it goes behind.
    urgent = make_sequence(1, 2 * LEVEL_US, priority=0, prompt=30, max_tokens=2)
    scheduler.add(urgent)
    first = step(scheduler).prefills[0]
    assert first.seq is (long if ages else urgent)
    assert long.num_preemptions == 0
    while scheduler.has_work:
        step(scheduler)


@pytest.mark.parametrize("levels", [1, 3])
def test_with_ageing_an_endless_row_of_urgent_requests_starves_none(levels):
    """One that waits LEVEL_US for each level is older than all that come."""
    scheduler = make_scheduler(priority_ageing_us=LEVEL_US)
    now_us, step_us = 0, 1_000_000
    patient = make_sequence(0, now_us, levels)
    scheduler.add(patient)
    began_us = None
    for seq_id in range(1, 400):
        scheduler.add(make_sequence(seq_id, now_us, 0))  # More than can be served.
        step(scheduler)
        now_us += step_us
        if patient.finished:
            break
        if began_us is None and now_us > step_us and patient.num_computed:
            began_us = now_us
    assert patient.finished
    # It starts when all who are to go before it have come, and those among them have been served.
    assert now_us < 12 * levels * LEVEL_US


def test_a_sequence_that_overtook_by_age_is_not_preempted():
    """Preempting only those who come after it, the urgent one waits: its room is not taken by
    preempting one and not the other."""
    scheduler = make_scheduler(num_pages=1 + 12, priority_ageing_us=LEVEL_US)
    old = make_sequence(1, 0, 2, prompt=16, max_tokens=9)
    young = make_sequence(2, 3 * LEVEL_US, 2, prompt=16, max_tokens=9)
    for seq in (old, young):
        scheduler.add(seq)
    for _ in range(3):
        step(scheduler)
    assert scheduler.num_running == 2
    # Later than both came, but of a priority that puts it between the two.
    urgent = make_sequence(3, 3 * LEVEL_US, 0, prompt=36, max_tokens=2)
    scheduler.add(urgent)
    assert old.order < urgent.order < young.order
    plan = step(scheduler)
    assert plan.preempted == ()
    assert young.state is SequenceState.RUNNING
    while scheduler.has_work:
        step(scheduler)
    assert young.num_preemptions == 0


# Fair shares


def test_a_light_tenant_is_admitted_before_a_heavy_ones_backlog(llama, alone, kv_llm_for):
    engine = kv_llm_for(host=64, preemption="swap", fair_share=True).engine
    heavy = [Arrival([3 + i, *prompt_of(llama, 15)], SEEDED, 0, tenant="heavy") for i in range(12)]
    light = [Arrival(prompt_of(llama, 17), SHORT, 3, tenant="light")]
    arrivals = heavy + light
    outputs, admitted = records(engine, Admitted, lambda: drive(engine, arrivals))
    check(alone, arrivals, outputs)
    order = [record.sequence for record in admitted]
    # It came last and is admitted as soon as one of those that ran has ended.
    assert order.index(max(order)) <= MAX_SEQS


def test_priority_does_not_reach_across_tenants(llama, alone, kv_llm_for):
    engine = kv_llm_for(host=64, preemption="swap", fair_share=True).engine
    usual = [
        Arrival(prompt_of(llama, 15), SEEDED, 0, priority=5, tenant=f"{i}") for i in range(MAX_SEQS)
    ]
    greedy = Arrival(prompt_of(llama, 17), SHORT, 5, priority=-100, tenant="pushing")
    arrivals = [*usual, greedy]
    outputs, preempted = records(engine, Preempted, lambda: drive(engine, arrivals))
    check(alone, arrivals, outputs)
    assert not preempted


def test_fair_shares_under_preemption(llama, alone, kv_llm_for):
    engine = kv_llm_for(host=64, preemption="swap", fair_share=True).engine
    chance = random.Random(5)
    arrivals = [
        Arrival(prompt, SHORT, step, chance.randint(0, 2), chance.choice(["a", "b", None]))
        for step, prompt in enumerate(llama.prompts * 2)
    ]
    check(alone, arrivals, drive(engine, arrivals, Preempter(engine, evicts=True)))
