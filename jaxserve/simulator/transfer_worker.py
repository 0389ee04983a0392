"""Transfers of KV pages between tiers on a virtual clock: bytes over bandwidth, and no bytes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxserve.kv.layout import TRANSFER_SIZES
from jaxserve.kv.offload.rates import OffloadRates
from jaxserve.kv.offload.transfer_worker import TransferHandle, TransferQueue
from jaxserve.kv.tier import Tier
from jaxserve.simulator.executor import VirtualClock


@dataclasses.dataclass(frozen=True)
class Link:
    """Speed of transfers between the device and host memory, or host memory and disk."""

    bytes_per_s: float
    latency_s: float = 0.0

    def us(self, num_bytes: int) -> int:
        """Microseconds of one transfer."""
        return round((self.latency_s + num_bytes / self.bytes_per_s) * 1e6)


class SimulatedTransferWorker(TransferQueue):
    """Runs transfers on a virtual clock, one at a time in each queue."""

    def __init__(
        self,
        links: dict[Tier, Link],
        *,
        page_bytes: int,
        clock: VirtualClock,
        staging_buffers: int = 2,
    ) -> None:
        """`links` has the link of each lower tier with those above it; a transfer between the
        device and a tier takes as long as the link of that tier needs."""
        super().__init__(
            links, page_bytes=page_bytes, clock=self._time, staging_buffers=staging_buffers
        )
        self._links = links
        self._virtual = clock
        self._event_us: int | None = None
        self._running: dict[int, tuple[int, TransferHandle]] = {}
        """The end and the handle of the transfer that each queue runs, by the queue's number."""

    def us(self, source: Tier, target: Tier, num_bytes: int) -> int:
        """Microseconds of one transfer between two tiers."""
        return max(
            self._links[tier].us(num_bytes) for tier in (source, target) if tier is not Tier.DEVICE
        )

    def calibrate(self, rates: OffloadRates) -> None:
        """Tells `rates` how long transfers take, as an engine measures them when it starts."""
        above = Tier.DEVICE
        for below in self._links:
            for source, target in ((above, below), (below, Tier.DEVICE)):
                for count in TRANSFER_SIZES:
                    num_bytes = count * self._page_bytes
                    rates.transferred(source, target, num_bytes, self.us(source, target, num_bytes))
            above = below

    def submit(
        self,
        source: Tier,
        source_pages: Sequence[int],
        target: Tier,
        target_pages: Sequence[int],
        staging: Any = None,
    ) -> TransferHandle:
        with self._up_to_date():
            return super().submit(source, source_pages, target, target_pages, staging)

    def reserve(self, timeout_us: int = 0) -> bool:
        give_up_us = self._virtual.now() + timeout_us
        self._progress()
        while not self._free_out and self._advance(give_up_us):
            pass
        return super().reserve()

    def ended(self) -> list[TransferHandle]:
        self._progress()
        return super().ended()

    def wait(self, timeout_us: int) -> bool:
        give_up_us = self._virtual.now() + timeout_us
        self._progress()
        while not self._ended and self._num_pending and self._advance(give_up_us):
            pass
        return bool(self._ended)

    def _consume(self, handle: TransferHandle) -> Any:
        with self._up_to_date():
            return super()._consume(handle)

    def _abandon(self, handle: TransferHandle) -> None:
        with self._up_to_date():
            super()._abandon(handle)

    @contextlib.contextmanager
    def _up_to_date(self) -> Iterator[None]:
        """For a block that changes what can begin now."""
        self._progress()
        yield
        self._progress()

    def _time(self) -> int:
        return self._virtual.now() if self._event_us is None else self._event_us

    def _advance(self, give_up_us: int) -> bool:
        """Moves the clock to the next end of a transfer; False if there is none in time."""
        next_us = min((end_us for end_us, _ in self._running.values()), default=give_up_us + 1)
        self._virtual.advance_to(min(next_us, give_up_us))
        self._progress()
        return next_us <= give_up_us

    def _progress(self) -> None:
        """Ends and begins the transfers that do so until now, in order of time."""
        while True:
            self._begin_all()
            number = min(self._running, key=lambda n: self._running[n][0], default=None)
            if number is None or self._running[number][0] > self._virtual.now():
                self._event_us = None
                return
            self._event_us, handle = self._running.pop(number)
            self._end(handle, staged=handle.num_bytes if handle.target is Tier.DEVICE else None)

    def _begin_all(self) -> None:
        for number, queue in enumerate(self._queues()):
            if number not in self._running and self._can_begin(queue):
                handle = self._begin(queue)
                us = self.us(handle.source, handle.target, handle.num_bytes)
                self._running[number] = self._time() + us, handle

    def _queues(self) -> Iterable[deque[TransferHandle]]:
        return self._to_device, self._from_device
