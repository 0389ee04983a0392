"""Chunks by predicted time and prefills by relative slack: the medha scheduler."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import Run, linear_times, simulate
from tiny_engines import MAX_SEQS, Arrival, drive
from workloads import Job

from jaxserve.core.errors import ConfigError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import Sequence
from jaxserve.core.steps.buckets import Buckets
from jaxserve.core.steps.plan import StepPlan
from jaxserve.kv.pages import PagePool
from jaxserve.metrics.statistics import percentile
from jaxserve.scheduler.scheduler import Scheduler, SchedulerConfig
from jaxserve.scheduler.slack import DEADLINE, LONG_STEPS, RelativeSlack
from jaxserve.scheduler.step_time import StepLoad, StepTime
from jaxserve.scheduler.token_budget import TimedTokenBudget

ROWS = 8
BUCKETS = Buckets(rows=(1, 2, 4, 8), mixed_rows=(0, ROWS), prefill_tokens=(32, 64, 128, 256, 512))
BASE_US, PER_TOKEN_US, PER_PAIR_US = 1000, 10, 0.0005
TARGET_US = 5000
IDLE = StepLoad()
TIMES = linear_times(BASE_US, PER_TOKEN_US, PER_PAIR_US)


def make_config(policy: str = "medha", **changes) -> SchedulerConfig:
    limits = {
        "policy": policy,
        "max_num_seqs": ROWS,
        "max_num_batched_tokens": ROWS + 512,
        "max_prefill_tokens": 512,
        "max_model_len": 1 << 20,
        "target_step_us": TARGET_US if policy == "medha" else None,
        "buckets": BUCKETS,
    }
    return SchedulerConfig(**limits | changes)


def make_sequence(seq_id: int, prompt: int, computed: int = 0, arrival_us: int = 0) -> Sequence:
    seq = Sequence(seq_id, f"r{seq_id}", 0, [7] * prompt, SamplingParams(), arrival_us)
    seq.num_computed = computed
    return seq


@pytest.fixture(scope="module")
def step_time() -> StepTime:
    """One that has seen every program with one chunk, at many contexts."""
    step_time, rng = StepTime(BUCKETS), random.Random(0)
    for _ in range(600):
        decodes, tokens = rng.choice([0, ROWS]), rng.choice(BUCKETS.prefill_tokens)
        load = StepLoad(decodes, 100 * decodes).plus(rng.randint(0, 50_000), tokens)
        program = BUCKETS.pick(decodes, tokens)
        us = BASE_US + PER_TOKEN_US * program.num_tokens + PER_PAIR_US * load.num_pairs
        step_time.observe(load, round(us))
    return step_time


def share_out(
    step_time: StepTime, sequences: list[Sequence], now_us: int = 0, load: StepLoad = IDLE
) -> dict[int, int]:
    """Tokens each sequence prefills in a step where all are in progress."""
    slack = RelativeSlack(step_time, TARGET_US)
    slack.now_us = now_us
    shares = TimedTokenBudget(make_config(), step_time, slack, load, 512, sequences)
    shares.give_running()
    shares.finish()
    return {seq.seq_id: share for seq, share in shares.taken}


# Chunks


@pytest.mark.parametrize("decodes", [0, ROWS])
def test_a_chunk_is_the_largest_in_time_and_never_grows_with_the_context(step_time, decodes):
    load, chunks = StepLoad(decodes, 100 * decodes), []
    for start in range(0, 250_000, 10_000):
        (share,) = share_out(step_time, [make_sequence(0, 300_000, start)], load=load).values()
        in_time = [
            size
            for size in BUCKETS.prefill_tokens
            if step_time.predict(load.plus(start, size)) <= TARGET_US
        ]
        assert share == max(in_time, default=BUCKETS.prefill_tokens[0])
        chunks.append(share)
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[0] >= 256 and chunks[-1] == 32


def test_the_last_piece_of_a_prompt_is_taken_whole(step_time):
    assert share_out(step_time, [make_sequence(0, 1005, 1000)]) == {0: 5}
    assert share_out(step_time, [make_sequence(0, 100)]) == {0: 100}


def test_before_anything_is_known_the_smallest_chunk_runs_and_nothing_else():
    sequences = [make_sequence(0, 1000), make_sequence(1, 1000)]
    assert share_out(StepTime(BUCKETS), sequences) == {0: 32}


# Slack


def test_short_prompts_run_beside_a_long_one_with_slack(step_time):
    long, short = make_sequence(0, 100_000), make_sequence(1, 60)
    shares = share_out(step_time, [long, short])
    assert shares[1] == 60 and shares[0] >= 128
    assert (shares[0] + shares[1]) in BUCKETS.prefill_tokens


def test_a_long_prompt_alone_takes_the_whole_step(step_time):
    assert share_out(step_time, [make_sequence(0, 100_000)])[0] >= 256


def test_a_long_prompt_that_is_late_yields_nothing_until_a_short_one_is_later(step_time):
    total_us = step_time.prefill_us(0, 100_000)
    late_us = DEADLINE * total_us
    long = make_sequence(0, 100_000)
    fresh = make_sequence(1, 200, arrival_us=late_us)
    assert share_out(step_time, [long, fresh], late_us) == {0: 256}
    waiting = make_sequence(1, 200, arrival_us=late_us - 10 * TARGET_US)
    assert share_out(step_time, [long, waiting], late_us)[1] == 200


def test_one_long_prompt_a_step_the_most_urgent_of_them(step_time):
    first, second = make_sequence(0, 100_000), make_sequence(1, 100_000)
    assert list(share_out(step_time, [first, second])) == [0]
    first.num_computed = 512  # It has less to do, so the second has less slack.
    assert list(share_out(step_time, [first, second])) == [1]


def test_sequences_at_the_slack_bound_are_ordered_by_arrival(step_time):
    slack = RelativeSlack(step_time, TARGET_US)
    slack.now_us = 1 << 40
    old_and_long, young_and_short = make_sequence(0, 100_000), make_sequence(1, 60, 0, 1000)
    assert slack.urgency(old_and_long) < slack.urgency(young_and_short)


# Whole runs


def serve(jobs: list[Job], policy: str = "medha", on_step=None, pages: int = 4000) -> Run:
    pool = PagePool(pages, 64)
    return simulate(jobs, make_config(policy), pool, TIMES, buckets=BUCKETS, on_step=on_step)


jobs_strategy = st.lists(
    st.builds(
        Job,
        arrival_us=st.integers(0, 300_000),
        prompt_tokens=st.one_of(st.integers(1, 600), st.integers(1, 8000)),
        output_tokens=st.integers(1, 20),
        priority=st.integers(-1, 1),
    ),
    min_size=1,
    max_size=16,
)


@settings(max_examples=20, deadline=None)
@given(jobs=jobs_strategy, pages=st.integers(200, 600))
def test_steps_are_in_time_decodes_never_dropped_and_all_finish(jobs, pages):
    def watch(scheduler: Scheduler, plan: StepPlan) -> None:
        assert plan.num_tokens <= scheduler.config.max_num_batched_tokens
        assert len(scheduler.running) <= ROWS
        decodes = {chunk.seq.seq_id for chunk in plan.decodes}
        prefilled = (s for s in scheduler.running if s.num_computed >= s.prefill_end)
        decoding = {s.seq_id for s in prefilled if not reached(s, plan)}
        assert decoding <= decodes
        long = [c for c in plan.prefills if is_long(scheduler, c.seq)]
        assert len(long) <= 1
        if plan.num_prefill_tokens > 32:
            assert scheduler.step_time.predict(StepLoad.of(plan)) <= TARGET_US

    run = serve(jobs, on_step=watch, pages=pages)
    assert [len(times) for times in run.token_us] == [job.output_tokens for job in jobs]


def reached(seq: Sequence, plan: StepPlan) -> bool:
    """Whether its prefill ends with this very plan."""
    return any(chunk.seq is seq and chunk.samples for chunk in plan.prefills)


def is_long(scheduler: Scheduler, seq: Sequence) -> bool:
    total_us = scheduler.step_time.prefill_us(0, seq.num_tokens)
    return total_us is not None and total_us > LONG_STEPS * TARGET_US


@pytest.fixture(scope="module")
def convoy() -> list[Job]:
    """Short requests all along, and after a while one prompt that takes 3 s alone."""
    short = [Job(20_000 * i, 100 + i % 100, 4) for i in range(250)]
    return [*short, Job(500_000, 80_000, 4)]


def test_short_requests_do_not_wait_for_a_long_one_which_is_in_time(convoy):
    alone, beside = serve(convoy[:-1]), serve(convoy)
    p99 = percentile(alone.first_token_us, 99)
    # The step in flight when it came, the one planned behind it and its own may be longer.
    assert percentile(beside.first_token_us[:-1], 99) <= p99 + 3 * TARGET_US
    assert beside.first_token_us[-1] <= DEADLINE * solo_us(convoy[-1])


def test_first_come_first_served_makes_a_convoy_of_the_same_trace(convoy):
    alone, behind = serve(convoy[:-1], "sarathi"), serve(convoy, "sarathi")
    p99 = percentile(alone.first_token_us, 99)
    assert percentile(behind.first_token_us[:-1], 99) > 200 * p99


def solo_us(job: Job) -> int:
    (first_us,) = serve([Job(0, job.prompt_tokens, 1)]).first_token_us
    return first_us


def test_an_endless_row_of_short_requests_starves_no_long_one():
    """More short ones than can be served, from before the long one came until long after."""
    short = [Job(900 * i, 500, 1, max_tokens=1) for i in range(300)]
    long = Job(100_000, 5000, 1, max_tokens=1)
    run = serve([*short, long])
    assert run.steps[-1].end_us > short[-1].arrival_us + 1_000_000, "there was no overload"
    assert run.token_us[-1][0] < run.steps[-1].end_us - 500_000


# Settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_step_us": None}, "target_step_us is None with scheduler 'medha'"),
        ({"buckets": None}, "need both target_step_us and buckets"),
        ({"target_step_us": 0}, "target_step_us is 0; it must be at least 1"),
        (
            {"policy": "sarathi", "target_step_us": 5},
            "target_step_us is 5 with scheduler 'sarathi'",
        ),
    ],
)
def test_a_target_goes_with_timed_chunks_alone(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_config(**changes)


def test_chunks_of_changing_size_leave_the_tokens_as_they_are(llama):
    """A target around what steps take here, so that sizes depend on the machine's noise."""
    changes = {"max_num_batched_tokens": MAX_SEQS + 128, "target_step_us": 2000}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with llama.load(scheduler="medha", **changes) as llm:
        arrivals = [Arrival(prompt, params, step) for step, prompt in enumerate(2 * llama.prompts)]
        for output in drive(llm.engine, arrivals):
            llama.check_greedy(output)
        assert llm.engine.scheduler.step_time.prefill_us(0, 100) > 0
