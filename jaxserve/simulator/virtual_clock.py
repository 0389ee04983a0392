"""A clock that moves only when told."""

from __future__ import annotations


class VirtualClock:
    """The time of a simulation, in microseconds from 0 on."""

    def __init__(self) -> None:
        self._now_us = 0

    def now(self) -> int:
        return self._now_us

    def advance_to(self, time_us: int) -> None:
        """Moves the clock to `time_us`, if that is later."""
        self._now_us = max(self._now_us, time_us)
