"""Curves of a load: latency distributions and time series."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from jaxserve.core.arithmetic import cdiv
from jaxserve.loadgen.results import RequestResult

Curve = tuple[list[float], list[float]]
"""The x and y values of points."""


def distribution(values: Iterable[float], total: int | None = None) -> Curve:
    """Cumulative distribution: each value, and the share of `total` (default all) at or below it.

    Starts with the smallest value at 0, where the curve rises from.
    """
    ordered = sorted(values)
    total = len(ordered) if total is None else total
    shares = [count / total for count in range(len(ordered) + 1)] if ordered else []
    return [*ordered[:1], *ordered], shares


def in_flight(results: Iterable[RequestResult]) -> Curve:
    """Seconds since the load began, and requests in flight from each on."""
    changes: dict[int, int] = {0: 0}
    for result in results:
        changes[result.sent_us] = changes.get(result.sent_us, 0) + 1
        changes[result.end_us] = changes.get(result.end_us, 0) - 1
    times = sorted(changes)
    return [us / 1e6 for us in times], list(accumulate(changes[us] for us in times))


def token_rate(results: Sequence[RequestResult], bin_us: int) -> Curve:
    """Seconds since the load began, one point every `bin_us`, and tokens per second from each on.

    Tokens of responses that failed later count too, since the server generated them.
    """
    end_us = max(result.end_us for result in results)
    counts = [0] * (end_us // bin_us + 1)
    for result in results:
        for token_us in result.response.token_us:
            counts[(result.sent_us + token_us) // bin_us] += 1
    return [place * bin_us / 1e6 for place in range(len(counts))], [
        count * 1e6 / bin_us for count in counts
    ]


def thinned(curve: Curve, most: int = 2000) -> Curve:
    """Subsample to at most about `most` points, evenly, with the first and the last: more than a
    plot can resolve."""
    step = cdiv(len(curve[0]), most) or 1
    return tuple([*values[:-1:step], *values[-1:]] for values in curve)
