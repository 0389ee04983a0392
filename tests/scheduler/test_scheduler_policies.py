"""What each policy promises, measured on the virtual clock."""

from __future__ import annotations

from collections import Counter

import pytest
from continuous_vs_static import least_iterations, static_iterations
from flover_arrivals import ITERATION_US, MEAN_GAPS_MS, OUTPUT_TOKENS, arrivals
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Run, linear_times, simulate
from workloads import Job

from jaxserve.core.steps.plan import StepPlan
from jaxserve.kv.pages import PagePool
from jaxserve.scheduler.scheduler import Scheduler, SchedulerConfig

BASE_US, PER_TOKEN_US = 1000, 10


def make_config(policy: str, rows: int = 4, prefill: int = 32) -> SchedulerConfig:
    return SchedulerConfig(
        policy=policy,
        max_num_seqs=rows,
        max_num_batched_tokens=rows + prefill,
        max_prefill_tokens=prefill,
        max_model_len=2048,
        min_chunk_tokens=8,
    )


def serve(policy: str, jobs: list[Job], on_step=None, **limits: int) -> Run:
    config = make_config(policy, **limits)
    pool = PagePool(2000, 16)
    return simulate(jobs, config, pool, linear_times(BASE_US, PER_TOKEN_US), on_step=on_step)


def jobs_of(lengths: list[int], prompt: int = 4) -> list[Job]:
    return [Job(0, prompt, length, max_tokens=length) for length in lengths]


# Static and continuous batching


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20), rows=st.integers(1, 5))
def test_iterations_agree_with_arithmetic(lengths, rows):
    jobs = jobs_of(lengths, prompt=4)
    limits = {"rows": rows, "prefill": 8 * rows}
    assert len(serve("static", jobs, **limits).steps) == static_iterations(jobs, rows)
    iterations = len(serve("orca", jobs, **limits).steps)
    assert least_iterations(jobs, rows) <= iterations <= static_iterations(jobs, rows)


def test_orca_lets_a_short_request_out_and_a_new_one_in_at_once():
    long, short, late = Job(0, 4, 20), Job(0, 4, 1, max_tokens=1), Job(BASE_US, 4, 2)
    run = serve("orca", [long, short, late], rows=2)
    first, _, third = run.steps[:3]
    assert run.token_us[1] == [first.end_us]
    # The second step was planned before it came.
    assert run.token_us[2][0] == third.end_us
    static = serve("static", [long, short, late], rows=2)
    assert static.token_us[2][0] > static.token_us[0][-1]


@settings(max_examples=30, deadline=None)
@given(
    jobs=st.lists(
        st.builds(Job, st.integers(0, 9000), st.integers(1, 100), st.integers(1, 20)), max_size=12
    )
)
def test_orca_never_runs_a_later_request_more_often_than_an_earlier_one(jobs):
    iterations: Counter[int] = Counter()

    def watch(scheduler: Scheduler, plan: StepPlan) -> None:
        iterations.update(chunk.seq.seq_id for chunk in (*plan.decodes, *plan.prefills))
        counts = [iterations[seq.seq_id] for seq in scheduler.running]
        assert counts == sorted(counts, reverse=True)
        reserved = sum(seq.kv_limit for seq in scheduler.running)
        assert reserved <= scheduler.pool.capacity * scheduler.pool.page_size

    serve("orca", jobs, watch)


# Chunks


def test_whole_prompts_are_split_only_when_they_are_larger_than_a_step():
    spans: dict[int, list[int]] = {}

    def watch(scheduler: Scheduler, plan: StepPlan) -> None:
        for chunk in plan.prefills:
            spans.setdefault(chunk.seq.seq_id, []).append(chunk.num_tokens)

    serve("vllm", [Job(0, 20, 3), Job(0, 20, 3), Job(0, 70, 3), Job(0, 26, 3)], watch)
    assert spans == {0: [20], 1: [20], 2: [32, 32, 6], 3: [26]}


def test_the_floor_leaves_a_hole_that_exact_fill_closes_by_splitting_two_prompts():
    def prefills(policy: str) -> list[list[int]]:
        plans: list[list[int]] = []

        def watch(scheduler: Scheduler, plan: StepPlan) -> None:
            plans.append([chunk.num_tokens for chunk in plan.prefills])

        serve(policy, [Job(0, 29, 1, max_tokens=1), Job(0, 40, 1, max_tokens=1)], watch)
        return [plan for plan in plans if plan]

    assert prefills("sarathi") == [[29], [32], [8]]
    assert prefills("splitfuse") == [[24, 8], [5, 27], [5]]


@settings(max_examples=30, deadline=None)
@given(prompts=st.lists(st.integers(1, 90), min_size=4, max_size=12))
def test_splitfuse_fills_every_step_exactly_while_prompts_wait(prompts):
    jobs = [Job(0, prompt, 1, max_tokens=1) for prompt in prompts]
    run = serve("splitfuse", jobs, rows=64)
    assert [step.num_tokens for step in run.steps[:-1]] == [32] * (len(run.steps) - 1)
    assert len(run.steps) == -(-sum(prompts) // 32)


def test_as_many_short_prompts_prefill_at_once_as_the_budget_holds():
    jobs = [Job(0, 20, 1, max_tokens=1) for _ in range(64)]
    run = serve("splitfuse", jobs, rows=64, prefill=512)
    assert [step.num_tokens for step in run.steps] == [512, 512, 256]
    singles = [Job(0, 1, 1, max_tokens=1) for _ in range(64)]
    assert [step.num_tokens for step in serve("sarathi", singles, rows=64).steps] == [32, 32]


# Time between tokens


arrivals_strategy = st.lists(
    st.builds(Job, st.integers(0, 60_000), st.integers(1, 400), st.integers(2, 40)),
    min_size=2,
    max_size=14,
)


@pytest.mark.parametrize("policy", ["orca", "sarathi", "splitfuse"])
@settings(max_examples=30, deadline=None)
@given(jobs=arrivals_strategy)
def test_stall_free_policies_bound_the_time_between_tokens(policy, jobs):
    run = serve(policy, jobs)
    bound_us = BASE_US + PER_TOKEN_US * (4 + 32)
    assert run.num_preemptions == 0
    assert max(run.between_tokens_us, default=0) <= bound_us


def test_prefill_first_breaks_that_bound():
    jobs = [Job(0, 8, 40), *(Job(5000, 320, 4) for _ in range(3))]
    bound_us = BASE_US + PER_TOKEN_US * (4 + 32)
    assert max(serve("vllm", jobs).between_tokens_us) > 10 * bound_us
    assert max(serve("sarathi", jobs).between_tokens_us) <= bound_us


def test_prefills_progress_in_order_while_every_other_row_decodes():
    jobs = [*(Job(0, 4, 200) for _ in range(3)), Job(2000, 100, 2), Job(2001, 100, 2)]
    run = serve("sarathi", jobs)
    decoding_us = min(run.token_us[i][-1] for i in range(3))
    assert run.token_us[3][0] < run.token_us[4][0]
    assert run.token_us[3][0] < decoding_us
    # 100 tokens at 32 a step, from the first step planned after it arrived.
    assert run.token_us[3][0] - 2000 <= 5 * (BASE_US + PER_TOKEN_US * 36)


# Flover


def fused_iterations(jobs: list[Job], iteration_us: int) -> int:
    """One loop over all live requests, simulated slot by slot. An iteration is planned when the one
    before begins, or if nothing is live then, when that has ended."""
    now = planned_us = count = 0
    left = [job.output_tokens for job in jobs]

    def live_at(time_us: int) -> list[int]:
        return [i for i, job in enumerate(jobs) if left[i] and job.arrival_us <= time_us]

    while any(left):
        live = live_at(planned_us) or live_at(now)
        if not live:
            now = planned_us = min(job.arrival_us for i, job in enumerate(jobs) if left[i])
            continue
        planned_us = now
        for i in live:
            left[i] -= 1
        now += iteration_us
        count += 1
    return count


@settings(max_examples=30, deadline=None)
@given(
    jobs=st.lists(
        st.builds(
            lambda arrival, length: Job(arrival, 4, length, max_tokens=length),
            st.integers(0, 400),
            st.integers(1, 20),
        ),
        min_size=1,
        max_size=10,
    )
)
def test_fused_iterations_equal_a_slot_by_slot_simulation(jobs):
    config = make_config("sarathi", rows=10, prefill=40)
    run = simulate(jobs, config, PagePool(2000, 16), linear_times(10, 0))
    assert len(run.steps) == fused_iterations(jobs, 10)


def test_fused_iterations_grow_with_the_gaps_as_in_flovers_experiment():
    config = make_config("sarathi", rows=32, prefill=256)
    counts = []
    for gap_ms in MEAN_GAPS_MS[::3]:
        jobs = arrivals(gap_ms, seed=0)
        run = simulate(jobs, config, PagePool(2000, 16), linear_times(ITERATION_US, 0))
        counts.append(len(run.steps))
        # It joins the iteration after the next, which is planned already.
        never_idle = -(-jobs[-1].arrival_us // ITERATION_US) + 1 + OUTPUT_TOKENS
        assert counts[-1] <= never_idle
        if gap_ms <= 500:
            assert counts[-1] == never_idle
    assert counts == sorted(counts)
    assert 1.05 < counts[0] / OUTPUT_TOKENS < 1.2
