"""Carries out the plans of the KV manager: page operations before each step, tier transfers.

Only programs dispatched here and the steps themselves touch the device's pool, all from the
engine's thread and so in one order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jaxserve.core.errors import ConfigError
from jaxserve.core.events import EventLog
from jaxserve.core.model_config import ModelConfig
from jaxserve.kv.invariants import check_invariants
from jaxserve.kv.manager import KVManager
from jaxserve.kv.page_table import PageTable
from jaxserve.kv.pages import TRASH_PAGE, PagePool
from jaxserve.kv.rates import Rates
from jaxserve.kv.tiers import DiskStore, HostStore, Store, Tier
from jaxserve.kv.transfer_worker import TransferHandle, TransferState, TransferWorker
from jaxserve.kv.transfers import MOVE_SIZES
from jaxserve.runtime.memory import STAGING_BUFFERS
from jaxserve.runtime.page_images import ImageLayout, PageImages
from jaxserve.runtime.runner import Runner
from jaxserve.runtime.staging import Staging
from jaxserve.runtime.startup import EnginePlan

_STAGING_WAIT_US = 100_000
"""How long a step waits for a staging buffer before it drops the save: too short for streaming
users to notice. After a timeout no step waits until a buffer is free again."""
_IDLE_WAIT_US = 10_000
"""How long an idle engine waits for a transfer."""
_SETTLE_US = 1_000_000
"""How long a snapshot waits for transfers: the KV of unfinished ones can be recomputed."""
_CALIBRATIONS = 3


class Paging:
    """An engine's KV manager, with the device, the transfer worker and the stores it uses."""

    def __init__(self, plan: EnginePlan, runner: Runner, log: EventLog) -> None:
        """Opens the lower tiers and times transfers to and from them.

        Raises ConfigError when a tier cannot be opened or its first transfer fails.
        """
        config, memory = plan.config, plan.memory
        self._runner = runner
        self._log = log
        self._debug = config.debug_kv
        self._stalled = False
        self._stores: dict[Tier, Store] = {}
        if memory.host_pages:
            self._stores[Tier.HOST] = HostStore(memory.host_pages, memory.image_bytes)
        if memory.disk_pages:
            self._stores[Tier.DISK] = DiskStore(
                config.disk_kv_dir, memory.disk_pages, memory.image_bytes
            )
        self._worker = None
        if self._stores:
            staging = Staging(plan.shapes.staging(1))
            self._worker = TransferWorker(
                self._stores,
                download=staging.download,
                upload=staging.upload,
                page_bytes=memory.image_bytes,
                clock=log.now,
                staging_buffers=STAGING_BUFFERS,
            )
        rates = Rates()
        if self._worker is not None:
            with log.phase("startup", "calibrate moves"):
                self._calibrate(rates)
        self.manager = KVManager(
            PagePool(memory.num_pages, config.page_size),
            prefix_caching=config.enable_prefix_caching,
            preemption=config.preemption,
            tiers={tier: store.num_pages for tier, store in self._stores.items()},
            page_bytes=memory.image_bytes,
            transfer_worker=self._worker,
            rates=rates,
        )

    def poll(self) -> None:
        """Processes finished transfers. Call it before a step is planned."""
        for handle in self.manager.poll(self._log.now()):
            if handle.state is TransferState.ABANDONED:
                continue  # It may never have started, and transferred nothing.
            self._log.moved(
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
        for load in operations.loads:
            self._runner.scatter(load.target_pages, load.handle.consume())
        for save in operations.saves:
            staging = None
            self._stalled = not self._worker.reserve(0 if self._stalled else _STAGING_WAIT_US)
            if not self._stalled:
                staging = self._runner.gather(save.source_pages)
            self.manager.begin(save, staging)
        if operations.copies:
            self._runner.copy(operations.copies)
        if self._debug and operations.freed:
            self._runner.poison(operations.freed)

    def images(self, model: ModelConfig) -> PageImages:
        """Access to pages on any tier; `model` is the config of the checkpoint, unpartitioned."""
        layout = ImageLayout(self._runner.shapes, model)
        return PageImages(layout, self._runner, self._stores)

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
        """Stops the transfer worker, frees the lower tiers and the device's memory. Idempotent."""
        self._runner = None
        if self._worker is not None:
            self._worker.close()
        for store in self._stores.values():
            store.close()
        self._stores.clear()

    def _calibrate(self, rates: Rates) -> None:
        """Times transfers of one page and of many between neighbouring tiers, all still empty."""
        tiers = list(self._stores)
        for _ in range(_CALIBRATIONS):
            for above, below in zip([Tier.DEVICE, *tiers], tiers):
                for count in self._sizes():
                    for handle in self._there_and_back(above, below, list(range(count))):
                        us = handle.ended_us - handle.begun_us
                        rates.moved(handle.source, handle.target, handle.num_bytes, us)

    def _sizes(self) -> list[int]:
        """Transfer sizes that fit every tier, to separate latency from bandwidth."""
        least = min(store.num_pages for store in self._stores.values())
        return [size for size in MOVE_SIZES if size <= least]

    def _there_and_back(
        self, above: Tier, below: Tier, pages: list[int]
    ) -> Iterable[TransferHandle]:
        """Transfers pages down a tier, then from there to the device; returns both handles."""
        staging = None
        if above is Tier.DEVICE:
            self._worker.reserve()
            staging = self._runner.gather([TRASH_PAGE] * len(pages))
        handles = [self._worker.move(above, pages, below, pages, staging)]
        self._finish(handles[0])
        handles.append(self._worker.move(below, pages, Tier.DEVICE, pages))
        self._finish(handles[1])
        for handle in handles:
            if handle.error is not None:
                raise ConfigError(
                    f"the first transfer of KV pages from {handle.source.value} to "
                    f"{handle.target.value} failed: {handle.error}. Fix that, or disable this tier "
                    "(host_kv_bytes, disk_kv_bytes)."
                )
        handles[1].consume()
        return handles

    def _finish(self, handle: TransferHandle) -> None:
        while handle not in self._worker.ended():
            self._worker.wait(_STAGING_WAIT_US)
