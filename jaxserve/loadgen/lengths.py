"""Lengths of requests, drawn at random: endless pairs of prompt and output tokens."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

LengthPairs = Iterator[tuple[int, int]]

_Z90 = 1.2815515655446004
"""Standard deviations from the median of a normal distribution to its 90th percentile."""


class Quantiles(NamedTuple):
    """Median and 90th percentile of a length, the second no smaller."""

    p50: int
    p90: int


def uniform_lengths(prompt: int, output: int, seed: int, range_ratio: float = 0.0) -> LengthPairs:
    """Both uniform in `1 - range_ratio .. 1 + range_ratio` times the given ones."""
    draw = _random(seed)

    def length(mean: int) -> int:
        spread = int(mean * range_ratio)
        return max(1, draw.randint(mean - spread, mean + spread)) if spread else mean

    while True:
        yield length(prompt), length(output)


def zipf_lengths(
    prompt: int, output: int, seed: int, range_ratio: float, theta: float
) -> LengthPairs:
    """As Vidur draws them (Agrawal et al. 2024): the tokens of a request, of its prompt and its
    output, are in `1 - range_ratio .. 1 + range_ratio` times those given, the n-th smallest number
    with a probability in proportion to n^-theta. The ratio of prompt to output is that given."""
    draw, total = _random(seed), prompt + output
    spread = int(total * range_ratio)
    up_to = list(itertools.accumulate(n**-theta for n in range(1, 2 * spread + 2)))
    while True:
        rank = bisect.bisect_right(up_to, draw.random() * up_to[-1], hi=2 * spread)
        tokens = max(2, total - spread + rank)
        outputs = min(tokens - 1, max(1, round(tokens * output / total)))
        yield tokens - outputs, outputs


def lognormal_lengths(prompt: Quantiles, output: Quantiles, seed: int) -> LengthPairs:
    """Both log-normal, by what papers report of data sets."""
    draw = _random(seed)

    def length(of: Quantiles) -> int:
        sigma = math.log(of.p90 / of.p50) / _Z90
        return max(1, round(draw.lognormvariate(math.log(of.p50), sigma)))

    while True:
        yield length(prompt), length(output)


def _random(seed: int) -> random.Random:
    return random.Random(f"{seed} lengths")
