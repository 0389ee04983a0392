from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.metrics.fluidity import (
    INTERACTIVE,
    Deadlines,
    Fluidity,
    fluid_decode_us,
    fluid_token_rate,
    fluidity,
    linear_prefill,
)

MS = 1000


def of_intervals(intervals, prefill, decode, arrival=0):
    """The fluidity of a stream given by the times before each token, in any one unit."""
    times = list(accumulate(intervals, initial=arrival))[1:]
    return fluidity(arrival, times, prefill, decode)


@pytest.mark.parametrize(
    ("intervals", "met", "missed"),
    [
        # Slack of 500; 400 is met and leaves 200; 500 is late by 200 and three deadlines.
        ([500, 400, 500], 2, 3),
        # The first token, late by 1500, and the fifteen tokens that should have followed it.
        ([2500], 0, 16),
        ([1000, *[100] * 50], 51, 0),
        # One stall of ten deadlines, without slack.
        ([1000, *[100] * 99, 1000], 100, 10),
        # The same stall, after a burst that has built up as much slack.
        ([1000, *[10] * 10, 1000], 12, 0),
        # Tokens that a step delivers together count as early ones.
        ([1000, 100, 0, 0, 300], 5, 0),
        # A late token restarts the deadlines: those after it are on time again.
        ([1000, 150, 100, 100], 3, 1),
        # Every interval is one percent over: a cliff.
        ([1000, *[101] * 20], 1, 20),
        ([], 0, 0),
    ],
)
def test_golden_vectors(intervals, met, missed):
    assert of_intervals(intervals, prefill=1000, decode=100) == Fluidity(met, missed)
    scaled = [interval * MS for interval in intervals]
    assert of_intervals(scaled, 1000 * MS, 100 * MS, arrival=12_345_678) == Fluidity(met, missed)


def test_the_index_is_the_share_of_deadlines_met():
    assert of_intervals([500, 400, 500], 1000, 100).index == 0.4
    assert of_intervals([1000, *[100] * 99, 1000], 1000, 100).index == pytest.approx(100 / 110)
    assert of_intervals([], 1000, 100).index == 1.0


def by_slack(intervals, prefill, decode):
    """The paper's own formulation, step by step, to hold the shorter one to."""
    slack = met = missed = 0
    for i, interval in enumerate(intervals):
        allowed = prefill if i == 0 else decode
        if interval <= allowed + slack:
            met += 1
            slack += allowed - interval
        else:
            late = interval - slack
            missed += 1 + (late - prefill) // decode if i == 0 else late // decode
            slack = 0
    return Fluidity(met, missed)


streams = st.lists(st.integers(0, 500), max_size=30)
prefills = st.integers(0, 1000)
decodes = st.integers(1, 200)


@given(streams, prefills, decodes)
def test_deadlines_are_the_slack_of_the_paper(intervals, prefill, decode):
    assert of_intervals(intervals, prefill, decode) == by_slack(intervals, prefill, decode)


@given(streams.filter(bool), prefills, decodes, st.integers(1, 1000))
def test_delaying_a_token_never_raises_the_fluidity_so_far(intervals, prefill, decode, delay):
    delayed = [*intervals[:-1], intervals[-1] + delay]
    before = of_intervals(intervals, prefill, decode)
    assert of_intervals(delayed, prefill, decode).index <= before.index


@given(streams, prefills, decodes)
def test_a_token_at_its_deadline_met_it_and_one_later_missed_it(intervals, prefill, decode):
    # Of an all-on-time stream the deadline of the next token is known in closed form.
    on_time = [min(interval, decode) for interval in intervals]
    on_time[:1] = [min(interval, prefill) for interval in on_time[:1]]
    allowed = prefill + len(on_time) * decode - sum(on_time)
    count = len(on_time)
    assert of_intervals([*on_time, allowed], prefill, decode) == Fluidity(count + 1, 0)
    assert of_intervals([*on_time, allowed + 1], prefill, decode) == Fluidity(
        count, 1 + 1 // decode
    )


@given(streams, prefills, decodes)
def test_a_longer_decode_deadline_never_misses_more(intervals, prefill, decode):
    shorter = of_intervals(intervals, prefill, decode)
    assert of_intervals(intervals, prefill, decode + 1).missed <= shorter.missed


@given(st.lists(st.integers(0, 60), max_size=15), prefills, st.sampled_from([0, 10, 50]))
def test_the_shortest_decode_deadline_is_that_of_a_linear_scan(intervals, prefill, percent):
    times = list(accumulate(intervals))

    def acceptable(decode):
        met, missed = fluidity(0, times, prefill, decode)
        return 100 * missed <= percent * (met + missed)

    scanned = next((decode for decode in range(1, 1000) if acceptable(decode)), None)
    assert fluid_decode_us(0, times, prefill, percent) == scanned


def test_no_pace_mends_a_first_token_that_is_too_late():
    assert fluid_decode_us(0, [2000 * MS], 1000 * MS) is None
    # Among enough tokens in time it is one miss of eleven, which is less than ten percent.
    times = [2000 * MS + i * 40 * MS for i in range(11)]
    assert fluid_decode_us(0, times, 1000 * MS) == 1000 * MS + 1
    assert fluid_decode_us(0, [50] * 11, 0) == 51


def test_token_rate_is_set_by_the_slow_tail():
    assert fluid_token_rate([20 * MS] * 99 + [500 * MS]) == 50.0
    assert fluid_token_rate([20 * MS] * 98 + [500 * MS] * 2) == 2.0
    assert fluid_token_rate([20 * MS] * 98 + [None] * 2) == 0.0
    assert fluid_token_rate([20 * MS] * 99 + [None]) == 50.0


def test_prefill_deadline_is_a_function_of_the_prompt():
    assert linear_prefill(300 * MS, 50)(2000) == 400 * MS
    assert INTERACTIVE.prefill_us(16_000) > INTERACTIVE.prefill_us(16)


def test_a_decode_deadline_is_at_least_a_microsecond():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        Deadlines(linear_prefill(1, 1), decode_us=0)
