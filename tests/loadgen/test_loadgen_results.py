"""The arithmetic of a load, on vectors whose answers are known."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.loadgen.results import Objectives, RequestResult, Summary
from jaxserve.loadgen.series import distribution, in_flight, thinned, token_rate
from jaxserve.loadgen.timed_response import TimedResponse
from jaxserve.loadgen.trace import TraceRequest
from jaxserve.metrics.fluidity import Deadlines, linear_prefill
from jaxserve.metrics.summaries import Percentiles

MS = 1000
DEADLINES = Deadlines(linear_prefill(900 * MS, 10 * MS), decode_us=100 * MS)
"""One second for a prompt of ten tokens."""


def result(intervals_ms, place=0, sent_ms=0, arrival_ms=0, failure=None, tail_ms=0, **counts):
    """A request for ten tokens whose answer's tokens came after these times one by one."""
    times = [ms * MS for ms in itertools.accumulate(intervals_ms)]
    end_us = (times[-1] if times else 0) + tail_ms * MS
    request = TraceRequest(arrival_ms * MS, 10, max(1, len(times)))
    response = TimedResponse(tuple(times), end_us, failure=failure, **counts)
    return RequestResult(place, request, sent_ms * MS, response)


def test_the_times_of_one_answer():
    one = result([500, 400, 501], sent_ms=30, arrival_ms=10, tail_ms=5)
    assert one.ttft_us == 500 * MS
    assert one.between_us == (400 * MS, 501 * MS)
    assert one.tpot_us == 450_500
    assert one.response.end_us == 1406 * MS
    assert one.end_us == 1436 * MS
    assert one.lag_us == 20 * MS


def test_answers_of_one_token_and_of_none_have_no_pace():
    assert (result([500]).tpot_us, result([500]).between_us) == (None, ())
    assert (result([]).ttft_us, result([]).tpot_us) == (None, None)


@pytest.mark.parametrize(
    ("intervals", "index"),
    [
        ([500, 400, 500], 0.4),
        ([2500], 0.0),
        ([1000, *[100] * 50], 1.0),
        ([1000, *[100] * 99, 1000], 100 / 110),
        ([1000, *[10] * 10, 1000], 1.0),
        # A hair too slow for every token: the cliff.
        ([1000, *[101] * 20], 1 / 21),
    ],
)
def test_fluidity_of_answers(intervals, index):
    assert result(intervals).fluidity(DEADLINES).index == pytest.approx(index)


def test_the_deadline_is_that_of_the_prompt_as_the_server_counted():
    late = [1500, 100]
    assert result(late).fluidity(DEADLINES).index < 1
    assert result(late, prompt_tokens=60).fluidity(DEADLINES).index == 1


def test_a_load_in_numbers():
    results = [
        result([100, 10, 10], 0, prompt_tokens=12, cached_tokens=4),
        result([200, 10, 30], 1, sent_ms=1000, arrival_ms=990, prompt_tokens=8),
        result([300], 2, sent_ms=1500, arrival_ms=1500),
        result([50], 3, sent_ms=1600, arrival_ms=1600, failure="HTTP 429"),
        result([], 4, sent_ms=1700, arrival_ms=1600, failure="HTTP 429"),
        result([], 5, sent_ms=1700, arrival_ms=1700, failure="timeout", tail_ms=300),
    ]
    summary = Summary.of(results, Objectives(ttft_us=200 * MS, itl_us=29 * MS), DEADLINES)
    assert (summary.requests, summary.completed) == (6, 3)
    assert summary.failures == {"HTTP 429": 2, "timeout": 1}
    assert summary.elapsed_us == 2000 * MS
    assert (summary.prompt_tokens, summary.cached_tokens) == (12 + 8 + 10, 4)
    assert summary.output_tokens == 7
    assert summary.per_second(summary.output_tokens) == 3.5
    assert summary.ttft_us == Percentiles(200 * MS, 300 * MS, 300 * MS)
    assert summary.between_us == Percentiles(10 * MS, 30 * MS, 30 * MS)
    assert summary.tpot_us == Percentiles(10 * MS, 20 * MS, 20 * MS)
    assert summary.e2e_us == Percentiles(240 * MS, 300 * MS, 300 * MS)
    assert (summary.lag_us.p50, summary.max_lag_us) == (0, 100 * MS)
    # The second has a gap of 30 ms, the third's first token comes too late, three failed.
    assert summary.goodput == 1
    assert (summary.mean_fluidity, summary.fluid) == (1.0, 3)
    # The last token of the second would be late, once, at up to 29 ms a token; of three tokens
    # that is too much. Its first is 800 ms early, which is slack enough for any pace.
    assert summary.fluid_tokens_per_s is None


def test_without_completed_requests_there_are_no_latencies():
    summary = Summary.of([result([], failure="HTTP 500")], Objectives(), DEADLINES)
    assert summary.ttft_us is summary.between_us is summary.tpot_us is summary.e2e_us is None
    assert summary.mean_fluidity is summary.goodput is summary.cached_tokens is None
    assert (summary.completed, summary.fluid_tokens_per_s) == (0, 0.0)


def test_the_fluid_token_rate_is_that_of_the_slowest():
    """First tokens at their deadline leave no slack, so the pace is that of the tokens."""
    fast, slow = result([1000, *[20] * 30]), result([1000, *[50] * 30])
    rates = [
        Summary.of(results, Objectives(), DEADLINES).fluid_tokens_per_s
        for results in ([fast], [slow], [fast, slow])
    ]
    # One token in ten may be late, and what is lost by that is a little pace.
    assert rates[0] == pytest.approx(50, rel=0.1)
    assert rates[1] == rates[2] == pytest.approx(20, rel=0.1)


intervals = st.lists(st.integers(0, 2000), min_size=1, max_size=12)
results_strategy = st.lists(
    st.tuples(intervals, st.sampled_from([None, "timeout"])), min_size=1, max_size=6
).map(lambda drawn: [result(times, failure=failure) for times, failure in drawn])
limits = st.one_of(st.none(), st.integers(1, 5000).map(lambda ms: ms * MS))


@given(results_strategy, st.tuples(limits, limits, limits, limits), st.integers(0, 3))
def test_a_laxer_objective_never_lowers_goodput(results, chosen, name):
    strict = Objectives(*chosen)
    field = dataclasses.fields(Objectives)[name].name
    for laxer in (None, (getattr(strict, field) or 0) * 2):
        if laxer is None or getattr(strict, field) is not None:
            lax = dataclasses.replace(strict, **{field: laxer})
            assert sum(map(strict.met_by, results)) <= sum(map(lax.met_by, results))


@given(results_strategy)
def test_without_objectives_goodput_is_what_completed(results):
    assert sum(map(Objectives().met_by, results)) == sum(one.completed for one in results)
    assert not Objectives()


@given(intervals, st.integers(0, 11), st.integers(1, 3000))
def test_delay_never_raises_the_fluidity_of_the_prefix(times, place, delay):
    place %= len(times)
    before = result(times[: place + 1])
    after = result([*times[:place], times[place] + delay])
    assert after.fluidity(DEADLINES).index <= before.fluidity(DEADLINES).index


@given(results_strategy)
def test_percentiles_are_ordered_and_rates_are_sums(results):
    summary = Summary.of(results, Objectives(), DEADLINES)
    for values in (summary.ttft_us, summary.between_us, summary.tpot_us, summary.e2e_us):
        assert values is None or values.p50 <= values.p90 <= values.p99
    assert summary.completed + sum(summary.failures.values()) == summary.requests
    assert summary.fluid <= summary.completed


def test_a_distribution_counts_values_at_or_below():
    assert distribution([30, 10, 20, 20]) == ([10, 10, 20, 20, 30], [0.0, 0.25, 0.5, 0.75, 1.0])
    assert distribution([10], total=4) == ([10, 10], [0.0, 0.25])
    assert distribution([]) == ([], [])


def test_requests_in_flight_at_each_moment():
    results = [result([1000], sent_ms=0), result([500], sent_ms=500), result([500], sent_ms=1000)]
    # At one second two end and one begins.
    assert in_flight(results) == ([0.0, 0.5, 1.0, 1.5], [1, 2, 1, 0])


@given(st.lists(st.tuples(intervals, st.integers(0, 3000)), min_size=1, max_size=6))
def test_in_flight_ends_at_none_and_tokens_are_all_counted(drawn):
    results = [result(times, sent_ms=sent) for times, sent in drawn]
    assert in_flight(results)[1][-1] == 0
    _, rates = token_rate(results, bin_us=250 * MS)
    assert sum(rates) * 0.25 == sum(len(times) for times, _ in drawn)


def test_tokens_per_second_over_time():
    results = [result([100, 100, 900], sent_ms=0), result([100], sent_ms=1900)]
    assert token_rate(results, bin_us=1000 * MS) == ([0.0, 1.0, 2.0], [2.0, 1.0, 1.0])


@given(st.integers(0, 200), st.integers(1, 50))
def test_a_thinned_curve_keeps_its_ends(count, most):
    places = list(range(count))
    kept, same = thinned((places, places), most)
    assert kept == same == sorted(set(kept))
    assert kept[:1] == places[:1]
    assert kept[-1:] == places[-1:]
    assert len(kept) <= most + 1
    assert len(kept) == count or count > most
