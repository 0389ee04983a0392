"""The fluidity index: the share of its token deadlines that a stream met.

From "Metron"/Etalon (Agrawal et al., 2024, arXiv:2407.07000). Averages and percentiles of the
time between tokens hide stalls, and give no credit to tokens delivered early, which a client
buffers. Here every token has a deadline, and an early token gives slack to the next ones.

The definition is that of the authors' code: a late token counts one missed deadline, plus one for
every further decode deadline that passed until it arrived. A stall is therefore weighted by its
length, and the total is not the number of tokens. All times are integer microseconds, as the
count of missed deadlines is a floor division.

For a steady stream the index is a step function (one percent too slow misses every deadline), so
report `fluid_token_rate` as well.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.metrics.statistics import percentile


@dataclass(frozen=True)
class Deadlines:
    """Token deadlines of a stream.

    `prefill_us(prompt_tokens)` is the time allowed from arrival to first token (predicted
    prefill time plus accepted queueing time); `decode_us` is the time allowed per later token.
    """

    prefill_us: Callable[[int], int]
    decode_us: int

    def __post_init__(self) -> None:
        if self.decode_us < 1:
            raise ValueError(f"decode_us must be at least 1, got {self.decode_us}")


def linear_prefill(base_us: int, per_token_us: int) -> Callable[[int], int]:
    """The deadline `base_us + per_token_us * prompt_tokens`, which other processes can be sent."""
    return functools.partial(_linear, base_us, per_token_us)


def _linear(base_us: int, per_token_us: int, prompt_tokens: int) -> int:
    return base_us + per_token_us * prompt_tokens


SHORTEST_US = 1
"""The resolution of times per token."""

INTERACTIVE = Deadlines(prefill_us=linear_prefill(1_000_000, 2_000), decode_us=100_000)
"""Interactive use: 10 tokens per second, the first after 1 s plus 2 ms per prompt token."""


class Fluidity(NamedTuple):
    """Deadlines met and missed by one stream, or summed over several."""

    met: int
    missed: int

    @property
    def index(self) -> float:
        """The share of deadlines met, 0..1; 1 if there were none."""
        total = self.met + self.missed
        return self.met / total if total else 1.0


def fluidity(arrival_us: int, token_us: Iterable[int], prefill_us: int, decode_us: int) -> Fluidity:
    """Counts the deadlines that one stream met and missed.

    `token_us` are the times of its tokens, ascending, on the clock of `arrival_us`;
    `prefill_us` and `decode_us` are the time allowed for the first and for each later token.
    A token exactly at its deadline meets it.

    The slack of the paper is the distance between a deadline and the token before it: a token
    in time advances the deadline by `decode_us`, a late one restarts it from its own arrival.
    """
    met = missed = 0
    deadline = arrival_us + prefill_us
    for time_us in token_us:
        if time_us <= deadline:
            met += 1
        else:
            missed += 1 + (time_us - deadline) // decode_us
            deadline = time_us
        deadline += decode_us
    return Fluidity(met, missed)


def fluid_decode_us(
    arrival_us: int, token_us: Sequence[int], prefill_us: int, max_missed_percent: int = 10
) -> int | None:
    """The shortest decode deadline [us] at which a stream misses at most `max_missed_percent`.

    None if no deadline suffices, because the late first token alone exceeds that share. A longer
    deadline never misses more, so binary search finds the answer.
    """

    def acceptable(decode_us: int) -> bool:
        result = fluidity(arrival_us, token_us, prefill_us, decode_us)
        return result.missed * 100 <= max_missed_percent * (result.met + result.missed)

    # With a deadline longer than the whole stream only the first token can be late, once.
    longest = 1 + max([0, *(time_us - arrival_us for time_us in token_us)])
    if not acceptable(longest):
        return None
    return 1 + bisect_left(range(1, longest), True, key=acceptable)


def fluid_token_rate(decode_us: Iterable[int | None]) -> float | None:
    """The fluid token generation rate of a set of streams, in tokens per second.

    `decode_us` has one `fluid_decode_us` per stream. The rate is the highest at which 99 % of the
    streams are fluid (nearest rank); 0 if fewer are fluid at any rate, None if so many are at every
    rate: a stream of a few tokens has more time for its first one than it needs for all.
    """
    longest = percentile((math.inf if us is None else us for us in decode_us), 99)
    return 1_000_000 / longest if longest > SHORTEST_US else None
