"""Carries out the plans of the KV manager: page operations before each step, tier transfers.

Only programs dispatched here and the steps themselves touch the device's pool, all from the
engine's thread and so in one order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxserve.core.events import EventLog
from jaxserve.kv.invariants import check_invariants
from jaxserve.kv.manager import KVManager
from jaxserve.kv.offload.stores import Store
from jaxserve.kv.offload.transfer_worker import TransferQueue, TransferState
from jaxserve.kv.page_table import PageTable
from jaxserve.kv.tier import Tier

_STAGING_WAIT_US = 100_000
"""How long a step waits for a staging buffer before it drops the save: too short for streaming
users to notice. After a timeout no step waits until a buffer is free again."""
_IDLE_WAIT_US = 10_000
"""How long an idle engine waits for a transfer."""
_SETTLE_US = 1_000_000
"""How long a snapshot waits for transfers: the KV of unfinished ones can be recomputed."""


class PageDevice(Protocol):
    """The device's page operations, in the order of its steps."""

    def gather(self, pages: Sequence[int]) -> Any:
        """A staging array with up to TRANSFER_PAGES pages."""

    def to_host(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages, given as (device, host), for sequences longer than the pool."""

    def scatter(self, pages: Sequence[int], staging: Any) -> None:
        """Writes the first rows of a staging array to pages."""

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies pages, given as (source, target); all sources are read first."""

    def poison(self, pages: Sequence[int]) -> None:
        """Fills pages with NaN, to expose reads before writes."""


class KVExecutor:
    """Carries out what an engine's KV manager plans, on the device and by the transfer queue.

    Attributes:
        manager: makes the plans.
        stores: the contents of the lower tiers, empty where transfers are simulated.
    """

    def __init__(
        self,
        manager: KVManager,
        worker: TransferQueue | None,
        device: PageDevice,
        log: EventLog,
        *,
        stores: Mapping[Tier, Store] | None = None,
        debug: bool = False,
    ) -> None:
        """`worker` is None without lower tiers. `debug` checks invariants and poisons pages."""
        self.manager = manager
        self.stores = dict(stores or {})
        self._worker = worker
        self._device = device
        self._log = log
        self._debug = debug
        self._stalled = False

    def poll(self) -> None:
        """Processes finished transfers. Call it before a step is planned."""
        for handle in self.manager.poll(self._log.now()):
            if handle.state is TransferState.ABANDONED:
                continue  # It may never have started, and transferred nothing.
            self._log.transferred(
                handle.source.value,
                handle.target.value,
                pages=len(handle.source_pages),
                num_bytes=handle.num_bytes,
                begin_us=handle.begun_us,
                end_us=handle.ended_us,
                error=handle.error,
            )

    def carry_out(self) -> None:
        """Dispatches the device operations needed before the step just planned."""
        operations = self.manager.operations()
        if operations.to_host:
            self._device.to_host(operations.to_host)
        for load in operations.loads:
            self._device.scatter(load.target_pages, load.handle.consume())
        for save in operations.saves:
            self._stalled = not self._worker.reserve(0 if self._stalled else _STAGING_WAIT_US)
            if self._stalled:
                self.manager.cancel_save(save)
            else:
                self.manager.start_save(save, self._device.gather(save.source_pages))
        if operations.copies:
            self._device.copy(operations.copies)
        if self._debug and operations.freed:
            self._device.poison(operations.freed)

    def settle(self) -> None:
        """Waits for all transfers in flight, for _SETTLE_US at most."""
        give_up_us = self._log.now() + _SETTLE_US
        while True:
            self.poll()
            self.carry_out()
            if not self.manager.num_in_flight_transfers or self._log.now() > give_up_us:
                return
            self.wait()

    def check(self, tables: Mapping[int, PageTable]) -> None:
        """In debug mode, raises PageError when these tables violate the KV invariants."""
        if self._debug:
            check_invariants(self.manager, tables.values())

    def wait(self) -> None:
        """Waits briefly for a transfer, when the engine is idle."""
        if self._worker is not None and self.manager.num_in_flight_transfers:
            self._worker.wait(_IDLE_WAIT_US)

    def close(self) -> None:
        """Ends the transfers, frees the lower tiers and releases the device. Idempotent."""
        self._device = None
        if self._worker is not None:
            self._worker.close()
        for store in self.stores.values():
            store.close()
        self.stores.clear()
