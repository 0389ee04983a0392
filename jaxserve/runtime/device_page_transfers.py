"""The page transfers of a runner: opens the lower tiers and measures them."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import numpy as np

from jaxserve.core.errors import ConfigError
from jaxserve.core.events import EventLog
from jaxserve.kv.host_pages import HostPages
from jaxserve.kv.manager import KVManager
from jaxserve.kv.offload.rates import OffloadRates
from jaxserve.kv.offload.stores import DiskStore, HostStore, Store
from jaxserve.kv.offload.transfer_worker import TransferHandle, TransferWorker
from jaxserve.kv.offload.transfers import TRANSFER_SIZES
from jaxserve.kv.page_transfers import PageTransfers
from jaxserve.kv.pages import TRASH_PAGE, PagePool
from jaxserve.kv.tier import Tier
from jaxserve.runtime.planning.memory import STAGING_BUFFERS
from jaxserve.runtime.runner import Runner
from jaxserve.runtime.startup.engine_plan import EnginePlan
from jaxserve.runtime.token_kv import PageBytesLayout, TokenKV

_CALIBRATIONS = 3
_CALIBRATION_WAIT_US = 100_000


class DevicePageTransfers(PageTransfers):
    """The page transfers of a runner, with the stores of its lower tiers."""

    def __init__(self, plan: EnginePlan, runner: Runner, log: EventLog) -> None:
        """Opens the lower tiers and times transfers to and from them.

        Raises ConfigError when a tier cannot be opened or its first transfer fails.
        """
        config, memory = plan.config, plan.memory
        self._runner = runner
        self._shapes = runner.shapes
        self._models = [plan.checkpoint.config]
        if plan.drafting_layers is not None:
            self._models.append(plan.drafting_layers)
        self._stores: dict[Tier, Store] = {}
        if memory.host_pages and not memory.kv_on_host:
            self._stores[Tier.HOST] = HostStore(memory.host_pages, memory.whole_page_bytes)
        if memory.disk_pages:
            self._stores[Tier.DISK] = DiskStore(
                config.disk_kv_dir, memory.disk_pages, memory.whole_page_bytes
            )
        worker, rates = None, OffloadRates()
        if self._stores:
            staging = Staging(plan.shapes.kv.staging(1))
            worker = TransferWorker(
                self._stores,
                download=staging.download,
                upload=staging.upload,
                page_bytes=memory.whole_page_bytes,
                clock=log.now,
                staging_buffers=STAGING_BUFFERS,
            )
        manager = KVManager(
            PagePool(memory.num_pages, config.page_size),
            layout=memory.layout,
            prefix_caching=config.enable_prefix_caching,
            preemption=config.preemption,
            tiers={tier: store.num_pages for tier, store in self._stores.items()},
            page_bytes=memory.whole_page_bytes,
            transfer_worker=worker,
            rates=rates,
            host_pages=memory.host_kv and HostPages(memory.host_kv),
        )
        super().__init__(manager, worker, runner, log, debug=config.debug_kv)
        if worker is not None:
            with log.phase("startup", "calibrate transfers"):
                self._calibrate(rates)

    def token_kv(self) -> TokenKV:
        """Access to pages on any tier."""
        shapes = self._shapes
        layouts: list[PageBytesLayout] = []
        for model, local_model in zip(self._models, (shapes.local_model, shapes.local_draft_model)):
            after = layouts[-1] if layouts else None
            layouts.append(PageBytesLayout(shapes, model, local_model, after))
        return TokenKV(layouts, shapes, self._runner, self._stores)

    def close(self) -> None:
        """Stops the transfer worker, frees the lower tiers and the device's memory. Idempotent."""
        self._runner = None
        super().close()
        for store in self._stores.values():
            store.close()
        self._stores.clear()

    def _calibrate(self, rates: OffloadRates) -> None:
        """Times transfers of one page and of many between neighbouring tiers, all still empty."""
        tiers = list(self._stores)
        for _ in range(_CALIBRATIONS):
            for above, below in zip([Tier.DEVICE, *tiers], tiers):
                for count in self._sizes():
                    for handle in self._there_and_back(above, below, list(range(count))):
                        us = handle.ended_us - handle.begun_us
                        rates.transferred(handle.source, handle.target, handle.num_bytes, us)

    def _sizes(self) -> list[int]:
        """Transfer sizes that fit every tier, to separate latency from bandwidth."""
        least = min(store.num_pages for store in self._stores.values())
        return [size for size in TRANSFER_SIZES if size <= least]

    def _there_and_back(
        self, above: Tier, below: Tier, pages: list[int]
    ) -> Iterable[TransferHandle]:
        """Transfers pages down a tier, then from there to the device; returns both handles."""
        staging = None
        if above is Tier.DEVICE:
            self._worker.reserve()
            staging = self._runner.gather([TRASH_PAGE] * len(pages))
        handles = [self._worker.submit(above, pages, below, pages, staging)]
        self._finish(handles[0])
        handles.append(self._worker.submit(below, pages, Tier.DEVICE, pages))
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
            self._worker.wait(_CALIBRATION_WAIT_US)


class Staging:
    """Copies staging arrays to the host and back, from any thread, without compiling.

    On accelerators pages pass through pinned host memory, which the device accesses by DMA.
    """

    def __init__(self, row: jax.ShapeDtypeStruct) -> None:
        """`row`: shape and sharding of a staging array of one page."""
        self._place = row.sharding
        self._dtype = row.dtype
        self._pinned = None
        if next(iter(row.sharding.device_set)).platform != "cpu":
            self._pinned = row.sharding.with_memory_kind("pinned_host")

    def download(self, staging: jax.Array) -> np.ndarray:
        """Waits for a gather and returns its pages [rows, elements], read-only."""
        if self._pinned is not None:
            staging = jax.device_put(staging, self._pinned)
        return np.asarray(staging)

    def upload(self, payload: np.ndarray) -> jax.Array:
        """A staging array of pages uint8 [rows, bytes], padded to the rows of a scatter program;
        waits until it is on the device."""
        size = next(size for size in TRANSFER_SIZES if size >= len(payload))
        padded = np.zeros((size, payload.shape[1]), np.uint8)
        padded[: len(payload)] = payload
        staging = padded.view(self._dtype)
        if self._pinned is not None:
            staging = jax.device_put(staging, self._pinned)
        return jax.block_until_ready(jax.device_put(staging, self._place))
