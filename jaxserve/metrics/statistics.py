"""Order statistics and histograms over integers."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxserve.core.arithmetic import cdiv


def percentile(values: Iterable[float], percent: int) -> float:
    """The nearest-rank percentile: the smallest value with `percent` % of all at or below it.

    Always one of `values`, never an interpolation, so integer inputs stay integers.
    Raises ValueError on an empty input or a `percent` outside 1..100.
    """
    if not 1 <= percent <= 100:
        raise ValueError(f"percent must be in 1..100, got {percent}")
    ordered = sorted(values)
    if not ordered:
        raise ValueError("a percentile needs at least one value")
    rank = cdiv(percent * len(ordered), 100)
    return ordered[rank - 1]


@dataclass(frozen=True)
class HistogramValue:
    """A snapshot of a histogram, in Prometheus form.

    `buckets` holds (upper bound, observations at or below it), cumulative; the last bound is
    infinity. `sum` and the bounds are in the exported unit of the metric.
    """

    buckets: tuple[tuple[float, int], ...]
    sum: float

    @property
    def count(self) -> int:
        return self.buckets[-1][1]


class Histogram:
    """Counts integer observations by bucket, without storing them."""

    def __init__(self, bounds: Sequence[int], units_per_export: int):
        """`bounds`: ascending, inclusive upper bounds in the observed unit.

        `units_per_export`: observed units per exported unit (1,000,000 when microseconds are
        exported as seconds).
        """
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0
        self._scale = units_per_export

    def observe(self, value: int, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def value(self) -> HistogramValue:
        buckets = []
        total = 0
        for bound, count in zip((*self._bounds, math.inf), self._counts):
            total += count
            buckets.append((bound / self._scale, total))
        return HistogramValue(tuple(buckets), self._sum / self._scale)
