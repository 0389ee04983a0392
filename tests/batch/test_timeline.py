"""Tokens over time, in bounded memory."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.offline.timeline import MAX_SAMPLES, RECENT, Timeline, duration


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 9), st.integers(0, 9)), max_size=50))
def test_samples_only_grow_and_end_with_all(steps):
    now = [0.0]
    timeline = Timeline(lambda: now[0])
    for seconds, prompt_tokens, output_tokens in steps:
        now[0] += seconds
        timeline.add(prompt_tokens, output_tokens)
    timeline.sample()
    assert timeline.samples[0] == (0, 0, 0)
    assert timeline.samples[-1][1:] == (sum(s[1] for s in steps), sum(s[2] for s in steps))
    for before, after in itertools.pairwise(timeline.samples):
        assert all(a <= b for a, b in zip(before, after))


def test_a_long_run_takes_no_more_memory():
    now = [0.0]
    timeline = Timeline(lambda: now[0])
    for _ in range(50 * MAX_SAMPLES):
        now[0] += 0.125
        timeline.add(2, 1)
    assert MAX_SAMPLES / 2 <= len(timeline.samples) <= MAX_SAMPLES
    gaps = [b.elapsed_s - a.elapsed_s for a, b in itertools.pairwise(timeline.samples[1:])]
    assert max(gaps) <= 2 * min(gaps)
    assert timeline.tokens_per_s == pytest.approx(24.0)


def test_the_rate_is_that_of_late():
    now = [0.0]
    timeline = Timeline(lambda: now[0])
    for rate in [100] * 50 + [10] * (RECENT + 1):
        now[0] += 1.0
        timeline.add(0, rate)
    assert timeline.tokens_per_s == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (59.4, "59.4 s"), (61, "1:01"), (3661.6, "1:01:02")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text
