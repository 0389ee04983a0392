from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.metrics.statistics import Histogram, percentile


def test_percentile_is_nearest_rank():
    values = [15, 20, 35, 40, 50]
    assert [percentile(values, p) for p in (5, 30, 40, 50, 100)] == [15, 20, 20, 35, 50]
    assert percentile(range(1, 101), 99) == 99
    assert percentile([7], 1) == 7


@given(st.lists(st.integers(0, 100), min_size=1), st.integers(1, 100))
def test_percentile_is_the_least_value_that_covers_its_share(values, percent):
    found = percentile(values, percent)
    assert found in values
    assert 100 * sum(v <= found for v in values) >= percent * len(values)
    assert 100 * sum(v < found for v in values) < percent * len(values)


def test_percentile_refuses_what_has_none():
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 50)
    with pytest.raises(ValueError, match="got 0"):
        percentile([1], 0)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5))))
def test_histogram_buckets_are_cumulative_and_inclusive(observations):
    bounds = (5, 10, 40)
    histogram = Histogram(bounds, units_per_export=10)
    for value, times in observations:
        histogram.observe(value, times)
    everything = [value for value, times in observations for _ in range(times)]
    result = histogram.value()
    assert result.buckets == (
        *((bound / 10, sum(value <= bound for value in everything)) for bound in bounds),
        (math.inf, len(everything)),
    )
    assert result.count == len(everything)
    assert result.sum == sum(everything) / 10


def test_a_value_taken_is_not_changed_by_later_observations():
    histogram = Histogram((1,), units_per_export=1)
    before = histogram.value()
    histogram.observe(1)
    assert (before.count, histogram.value().count) == (0, 1)
