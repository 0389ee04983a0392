"""How long the devices had no step to compute, from the event log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from jaxserve.core.events import Collected, Dispatched, Record


class DeviceIdle(NamedTuple):
    """Bounds of the share of a run in which no step ran on the devices.

    They are the same where the host waited for every step. When the devices were done with a step
    before the host began to wait for it, its end is unknown: for `least` it is when its tokens
    reached the host, for `most` it is the step's beginning.
    """

    least: float
    most: float

    @classmethod
    def of(cls, records: Iterable[Record]) -> DeviceIdle | None:
        """From the call of the first step's program until the last step's tokens reached the host;
        None without a step. Steps run one after another, each from the call of its program or the
        end of the step before it."""
        called_us: dict[int, int] = {}
        first_us = last_us = None
        computed_us = certain_us = 0
        for record in records:
            if isinstance(record, Dispatched):
                called_us[record.step] = record.packed_us
            elif isinstance(record, Collected):
                begin_us = called_us.pop(record.step)
                if last_us is None:
                    first_us = last_us = begin_us
                span_us = record.time_us - max(begin_us, last_us)
                last_us = record.time_us
                computed_us += span_us
                certain_us += 0 if record.late else span_us
        if first_us is None or last_us is None or last_us == first_us:
            return None
        total_us = last_us - first_us
        return cls(1 - computed_us / total_us, 1 - certain_us / total_us)

    def __str__(self) -> str:
        least, most = f"{self.least:.1%}", f"{self.most:.1%}"
        return least if least == most else f"{least} to {most}"
