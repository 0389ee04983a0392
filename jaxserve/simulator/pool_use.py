"""How full the KV pool was, over time."""

from __future__ import annotations

from jaxserve.core.events import Dispatched, Record

_MAX_POINTS = 2048


class PoolUse:
    """A sink of an event log: pages in use at each dispatch, as shares of the pool.

    Attributes:
        peak: the largest share.
        points: (time_us, share), thinned evenly to at most 2,048.
    """

    def __init__(self) -> None:
        self.peak = 0.0
        self.points: list[tuple[int, float]] = []
        self._every, self._seen = 1, 0
        self._since_us, self._share, self._sum = 0, 0.0, 0.0

    def fold(self, record: Record) -> None:
        if type(record) is not Dispatched:
            return
        now_us, share = record.time_us, record.pages_used / record.pages_total
        self._sum += self._share * (now_us - self._since_us)
        self._since_us, self._share = now_us, share
        self.peak = max(self.peak, share)
        if self._seen % self._every == 0:
            self.points.append((now_us, share))
            if len(self.points) > _MAX_POINTS:
                self.points = self.points[::2]
                self._every *= 2
        self._seen += 1

    @property
    def curve(self) -> tuple[list[float], list[float]]:
        """The points as seconds, and shares."""
        return [us / 1e6 for us, _ in self.points], [share for _, share in self.points]

    @property
    def mean(self) -> float:
        """Average over time, up to the last dispatch."""
        return self._sum / self._since_us if self._since_us else self._share
