"""What computing KV and moving it cost, learnt from what they took.

A preempted sequence can be computed again or moved away and back. Which is cheaper depends on the
machine, the model and the load, so nothing is assumed: the engine reports what it timed, and
`Rates` predicts from that. Two costs, both of the form `first * x + second * y`:

- a step: `us_per_token * tokens + us_per_pair * pairs`, where pairs are those of a query and a key
  it sees (the prefill term of Vidur's predictor, Agrawal et al. 2024, without its constant);
- a move: `us_per_byte * bytes + latency_us`, for each direction between two tiers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

MEMORY = 64
"""Observations that an estimate rests on: one so many steps old weighs 1/e of the latest."""

SPEED_MEMORY = 8
"""Observations over which a change of the machine's speed is averaged."""

SURPRISE = 2
"""An observation counts as at most so many times faster than predicted, and changes the speed as
one that was at most so many times faster or slower."""


def causal_pairs(start: int, stop: int) -> int:
    """Query-key pairs of the tokens at positions `start .. stop - 1`, each of which sees itself and
    all before it. It adds up over chunks: how a prompt is cut makes no difference."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


class LinearCost:
    """`us = first * x + second * y` with coefficients >= 0, fitted online.

    Least squares over the relative errors `1 - predicted / us`, exponentially forgetting, by the
    2 x 2 normal equations. What makes it safe to believe at any time:

    - Data that are all alike (always the same ratio of y to x) cannot tell the two apart. So the
      estimate is drawn to the one before it with as much weight as all data have: where they say
      nothing it stays, and the equations are never singular. At first all cost is put on x.
    - A machine that slows down would leave old and new data in conflict. So all that is known is
      first scaled towards the speed just seen, some way at each observation: a change is followed
      within some tens, also for sizes not seen since.
    - A stall makes a step slow, and relative errors give slow outliers little weight: one that
      took k times as long pulls 1/k as hard. The very first observation, which may have paged
      something in, counts only until there is a second.
    - A fast outlier, of a clock read late, would weigh much: see `SURPRISE`.
    """

    def __init__(self) -> None:
        self.first = self.second = 0.0
        self._num_observed = 0
        # Sums over observations, of x and y divided by the time they took.
        self._x = self._y = self._xx = self._xy = self._yy = 0.0

    @property
    def known(self) -> bool:
        return self._num_observed > 0

    def observe(self, x: int, y: int, us: int) -> None:
        """Learns that (x, y) took `us`. Raises ValueError unless x and y are at least 1."""
        if x < 1 or y < 1:
            raise ValueError(f"nothing can be learnt from ({x}, {y}); both must be at least 1")
        us = max(us, 1)
        self._num_observed += 1
        if self._num_observed <= 2:
            self.first, self.second = us / x, 0.0
            self._x = self._y = self._xx = self._xy = self._yy = 0.0
        predicted = self.predict(x, y)
        us = max(us, predicted / SURPRISE)
        self._rescale(min(us / predicted, SURPRISE) ** (1 / SPEED_MEMORY))
        self._add(x / us, y / us)
        self._solve()

    def predict(self, x: int, y: int) -> float:
        """The microseconds that (x, y) should take."""
        return self.first * x + self.second * y

    def _rescale(self, slower: float) -> None:
        """Takes all that is known as if it had been seen on a machine `slower` times as slow."""
        self.first, self.second = self.first * slower, self.second * slower
        self._x, self._y = self._x / slower, self._y / slower
        square = slower * slower
        self._xx, self._xy, self._yy = self._xx / square, self._xy / square, self._yy / square

    def _add(self, x: float, y: float) -> None:
        kept = 1 - 1 / MEMORY
        self._x, self._y = kept * self._x + x, kept * self._y + y
        self._xx, self._yy = kept * self._xx + x * x, kept * self._yy + y * y
        self._xy = kept * self._xy + x * y

    def _solve(self) -> None:
        """Sets the coefficients that fit both the data and the estimate so far best."""
        x = self._x + self._xx * self.first
        y = self._y + self._yy * self.second
        # By Cauchy and Schwarz at least three quarters of its first term, so positive.
        determinant = 4 * self._xx * self._yy - self._xy * self._xy
        first = (2 * self._yy * x - self._xy * y) / determinant
        second = (2 * self._xx * y - self._xy * x) / determinant
        # All sums are positive, so at most one of the two is negative; the best fit is then at 0.
        if first < 0:
            first, second = 0.0, y / (2 * self._yy)
        elif second < 0:
            first, second = x / (2 * self._xx), 0.0
        self.first, self.second = first, second


class Rates:
    """Observed costs of prefilling and moving, and what they say of the next.

    Tiers are named by any hashable; moving one way and moving back are two directions. It has no
    clock: times are measured by whoever reports them, in integer microseconds.
    """

    def __init__(self) -> None:
        self._prefill = LinearCost()
        self._moves: dict[tuple[Hashable, Hashable], LinearCost] = {}

    # Observations

    def prefilled(self, num_tokens: int, num_pairs: int, us: int) -> None:
        """A step that prefilled took `us`.

        num_tokens: all that it computed, decodes included. What a step costs whatever its size is
            not modelled, so report steps that were mostly prefill.
        num_pairs: the sum of `causal_pairs` over its prefill chunks.

        Raises ValueError unless both are at least 1.
        """
        self._prefill.observe(num_tokens, num_pairs, us)

    def moved(self, source: Hashable, target: Hashable, num_bytes: int, us: int) -> None:
        """One move of `num_bytes` from tier `source` to tier `target` took `us`.

        Raises ValueError unless there was at least one byte.
        """
        self._move(source, target).observe(num_bytes, 1, us)

    # Predictions

    def prefill_us(self, start: int, stop: int) -> int | None:
        """Time to prefill positions `start .. stop - 1`; None before any step was observed."""
        if start >= stop:
            return 0
        if not self._prefill.known:
            return None
        return round(self._prefill.predict(stop - start, causal_pairs(start, stop)))

    def move_us(self, source: Hashable, target: Hashable, num_bytes: int) -> int | None:
        """Time of one move; None before any was observed in this direction. No bytes, no time."""
        if not num_bytes:
            return 0
        cost = self._move(source, target)
        return round(cost.predict(num_bytes, 1)) if cost.known else None

    def prefers_swap(
        self, start: int, stop: int, moves: Iterable[tuple[Hashable, Hashable, int]]
    ) -> bool:
        """Whether moving KV away and back takes less time than computing it again.

        start, stop: the positions `start .. stop - 1` that would be prefilled again.
        moves: each (source, target, bytes) that swapping them needs, those out now and those back
            later; bytes may be 0 where an image lies there already.

        False while a move it needs was never timed, for it may take forever; otherwise True while
        no prefill was. Equal costs are for computing, which takes no room in another tier.
        """
        swap_us = 0
        for source, target, num_bytes in moves:
            us = self.move_us(source, target, num_bytes)
            if us is None:
                return False
            swap_us += us
        prefill_us = self.prefill_us(start, stop)
        return prefill_us is None or swap_us < prefill_us

    # Metrics

    def prefill_tokens_per_s(self) -> int | None:
        """Tokens a second at the start of a context, where attention costs nothing; None before
        any step was observed, or when all of their time went by pairs."""
        return _per_second(self._prefill)

    def bytes_per_s(self, source: Hashable, target: Hashable) -> int | None:
        """Bandwidth of a direction, latency apart; None before any move was observed, or when
        their size made no difference."""
        return _per_second(self._move(source, target))

    def _move(self, source: Hashable, target: Hashable) -> LinearCost:
        return self._moves.setdefault((source, target), LinearCost())


def _per_second(cost: LinearCost) -> int | None:
    return round(1_000_000 / cost.first) if cost.first else None
