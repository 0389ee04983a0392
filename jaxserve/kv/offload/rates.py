"""Cost models of prefill and of KV transfers, fitted online to measured times.

A preempted sequence can be recomputed or swapped. Which is cheaper depends on the machine, the
model and the load, so nothing is assumed: the engine reports measured times, and `OffloadRates`
predicts from them. Two costs, both of the form `first * x + second * y`:

- a step: `us_per_token * tokens + us_per_pair * pairs`, where pairs are (query, visible key) pairs
  (the prefill term of Vidur's predictor, Agrawal et al. 2024, without its constant);
- a transfer: `us_per_byte * bytes + latency_us`, for each direction between two tiers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from jaxserve.core.steps.work import causal_pairs

HORIZON = 64
"""Forgetting horizon in observations: one this many steps old weighs 1/e of the latest."""

SPEED_HORIZON = 8
"""Observations over which a change of the machine's speed is averaged."""

OUTLIER_FACTOR = 2
"""Outlier limit: an observation is clipped to this many times faster than predicted, and its effect
on the speed to this many times faster or slower."""


class LinearCost:
    """`us = first * x + second * y` with coefficients >= 0, fitted online.

    Least squares over the relative errors `1 - predicted / us`, exponentially forgetting, by the
    2 x 2 normal equations. Measures for robustness:

    - Data with a constant ratio of y to x cannot separate the two coefficients. So the estimate is
      regularized towards the previous one with as much weight as all data have: it stays where
      the data say nothing, and the equations are never singular. At first all cost is put on x.
    - If the machine slows down, old and new data conflict. So each observation first scales the
      old data and the estimate part of the way to the speed just seen: a change is followed
      within some tens of observations, also for sizes not seen since.
    - Stalls make steps slow, and relative errors give slow outliers little weight: one that took
      k times as long has 1/k of the influence. The very first observation, which may include page
      faults, counts only until there is a second.
    - A fast outlier, from a clock read late, would have a large weight: see `OUTLIER_FACTOR`.
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
        """Records that (x, y) took `us`. Raises ValueError unless x and y are at least 1."""
        if x < 1 or y < 1:
            raise ValueError(f"cannot fit to an observation of ({x}, {y}); both must be at least 1")
        us = max(us, 1)
        self._num_observed += 1
        if self._num_observed <= 2:
            self.first, self.second = us / x, 0.0
            self._x = self._y = self._xx = self._xy = self._yy = 0.0
        predicted = self.predict(x, y)
        us = max(us, predicted / OUTLIER_FACTOR)
        self._rescale(min(us / predicted, OUTLIER_FACTOR) ** (1 / SPEED_HORIZON))
        self._add(x / us, y / us)
        self._solve()

    def predict(self, x: int, y: int) -> float:
        """The predicted microseconds of (x, y)."""
        return self.first * x + self.second * y

    def _rescale(self, slower: float) -> None:
        """Rescales data and estimate to a machine that is `slower` times as slow."""
        self.first, self.second = self.first * slower, self.second * slower
        self._x, self._y = self._x / slower, self._y / slower
        square = slower * slower
        self._xx, self._xy, self._yy = self._xx / square, self._xy / square, self._yy / square

    def _add(self, x: float, y: float) -> None:
        kept = 1 - 1 / HORIZON
        self._x, self._y = kept * self._x + x, kept * self._y + y
        self._xx, self._yy = kept * self._xx + x * x, kept * self._yy + y * y
        self._xy = kept * self._xy + x * y

    def _solve(self) -> None:
        """Sets the coefficients that best fit both the data and the previous estimate."""
        x = self._x + self._xx * self.first
        y = self._y + self._yy * self.second
        # By Cauchy-Schwarz at least three quarters of its first term, so positive.
        determinant = 4 * self._xx * self._yy - self._xy * self._xy
        first = (2 * self._yy * x - self._xy * y) / determinant
        second = (2 * self._xx * y - self._xy * x) / determinant
        # All sums are positive, so at most one coefficient is negative; its best fit is then 0.
        if first < 0:
            first, second = 0.0, y / (2 * self._yy)
        elif second < 0:
            first, second = x / (2 * self._xx), 0.0
        self.first, self.second = first, second


class OffloadRates:
    """Predicts prefill and transfer times from observed ones.

    A tier is named by any hashable; each direction between two tiers has its own cost. There is no
    clock: callers measure and report times in integer microseconds.
    """

    def __init__(self) -> None:
        self._prefill = LinearCost()
        self._transfers: dict[tuple[Hashable, Hashable], LinearCost] = {}

    # Observations

    def prefilled(self, num_tokens: int, num_pairs: int, us: int) -> None:
        """Records that a step with prefill took `us`.

        num_tokens: all computed tokens, decodes included. The constant cost of a step is not
            modelled, so report steps that were mostly prefill.
        num_pairs: the sum of `causal_pairs` over its prefill chunks.

        Raises ValueError unless both are at least 1.
        """
        self._prefill.observe(num_tokens, num_pairs, us)

    def transferred(self, source: Hashable, target: Hashable, num_bytes: int, us: int) -> None:
        """Records that a transfer of `num_bytes` from tier `source` to tier `target` took `us`.

        Raises ValueError unless there was at least one byte.
        """
        self._move(source, target).observe(num_bytes, 1, us)

    # Predictions

    def prefill_us(self, start: int, stop: int) -> int | None:
        """Predicted time to prefill positions `start .. stop - 1`; None before any observation."""
        if start >= stop:
            return 0
        if not self._prefill.known:
            return None
        return round(self._prefill.predict(stop - start, causal_pairs(start, stop)))

    def transfer_us(self, source: Hashable, target: Hashable, num_bytes: int) -> int | None:
        """Predicted time of one transfer, 0 for no bytes; None before any in this direction."""
        if not num_bytes:
            return 0
        cost = self._move(source, target)
        return round(cost.predict(num_bytes, 1)) if cost.known else None

    def prefers_swap(
        self, start: int, stop: int, transfers: Iterable[tuple[Hashable, Hashable, int]]
    ) -> bool:
        """Whether swapping KV out and in takes less time than recomputing it.

        start, stop: the positions `start .. stop - 1` that would be prefilled again.
        transfers: each (source, target, bytes) transfer needed to swap them, out now and in later;
            bytes may be 0 where the target already has the pages.

        False while a needed transfer was never timed, since its time is unbounded; otherwise True
        while no prefill was timed. Ties favour recomputing, which takes no room in another tier.
        """
        swap_us = 0
        for source, target, num_bytes in transfers:
            us = self.transfer_us(source, target, num_bytes)
            if us is None:
                return False
            swap_us += us
        prefill_us = self.prefill_us(start, stop)
        return prefill_us is None or swap_us < prefill_us

    # Metrics

    def prefill_tokens_per_s(self) -> int | None:
        """Tokens per second at the start of a context, where attention costs nothing; None before
        any step was observed, or when all cost is attributed to pairs."""
        return _per_second(self._prefill)

    def bytes_per_s(self, source: Hashable, target: Hashable) -> int | None:
        """Bandwidth of a direction without latency; None before any transfer was observed, or
        when transfer time did not depend on size."""
        return _per_second(self._move(source, target))

    def _move(self, source: Hashable, target: Hashable) -> LinearCost:
        return self._transfers.setdefault((source, target), LinearCost())


def _per_second(cost: LinearCost) -> int | None:
    return round(1_000_000 / cost.first) if cost.first else None
