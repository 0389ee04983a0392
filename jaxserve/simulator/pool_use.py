"""How full the KV pool was, over time."""

from __future__ import annotations

from jaxserve.core.arithmetic import cdiv
from jaxserve.kv.pages import PagePool
from jaxserve.simulator.executor import VirtualClock

_MAX_POINTS = 1024


class PoolUse:
    """Pages in use, as shares of a pool, of the whole time that a clock has passed.

    Attributes:
        peak: the largest share.
        share_us: the integral of the share over time, in microseconds.
    """

    def __init__(self, pool: PagePool, clock: VirtualClock) -> None:
        self.peak = self.share_us = 0.0
        self._pool, self._clock = pool, clock
        # Integrals of equal spans of time, which double where there is more time than spans.
        self._spans, self._span_us = [0.0] * _MAX_POINTS, 1
        clock.watchers.append(self._passed)

    @property
    def points(self) -> list[tuple[int, float]]:
        """(time_us, share), at most 1,025: the mean from then until the next point. The last one is
        the present."""
        width, now_us = self._span_us, self._clock.now()
        means = [
            (index * width, share_us / min(width, now_us - index * width))
            for index, share_us in enumerate(self._spans[: cdiv(now_us, width)])
        ]
        return [*means, (now_us, self._share)]

    @property
    def curve(self) -> tuple[list[float], list[float]]:
        """The points as seconds, and shares."""
        times_us, values = zip(*self.points)
        return [us / 1e6 for us in times_us], list(values)

    @property
    def _share(self) -> float:
        return self._pool.num_used / self._pool.capacity

    def _passed(self, begin_us: int, end_us: int) -> None:
        """Counts the pages that are in use: nothing took or freed any meanwhile."""
        while end_us > self._span_us * _MAX_POINTS:
            halves = self._spans[::2], self._spans[1::2]
            self._spans = [a + b for a, b in zip(*halves)] + [0.0] * (_MAX_POINTS // 2)
            self._span_us *= 2
        if not (share := self._share):
            return
        self.peak = max(self.peak, share)
        self.share_us += share * (end_us - begin_us)
        while begin_us < end_us:
            index = begin_us // self._span_us
            until_us = min(end_us, (index + 1) * self._span_us)
            self._spans[index] += share * (until_us - begin_us)
            begin_us = until_us
