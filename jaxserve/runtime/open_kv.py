"""Opens the KV of an engine: its manager, the lower tiers, and the transfers between them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import jax
import numpy as np

from jaxserve.core.errors import ConfigError
from jaxserve.core.events import EventLog
from jaxserve.kv.host_pages import HostPages
from jaxserve.kv.kv_executor import KVExecutor
from jaxserve.kv.layout import TRANSFER_SIZES
from jaxserve.kv.manager import KVManager
from jaxserve.kv.offload.rates import OffloadRates
from jaxserve.kv.offload.stores import DiskStore, HostStore, Store
from jaxserve.kv.offload.transfer_worker import TransferHandle, TransferWorker
from jaxserve.kv.pages import TRASH_PAGE, PagePool
from jaxserve.kv.tier import Tier
from jaxserve.runtime.planning.memory import STAGING_BUFFERS
from jaxserve.runtime.runner import Runner
from jaxserve.runtime.startup.engine_plan import EnginePlan

_CALIBRATIONS = 3
_CALIBRATION_WAIT_US = 100_000


def open_kv(plan: EnginePlan, runner: Runner, log: EventLog) -> KVExecutor:
    """The KV of an engine, on the pages of its runner and on lower tiers, which it opens and times.

    Raises ConfigError when a tier cannot be opened or its first transfer fails.
    """
    config, memory = plan.config, plan.memory
    stores: dict[Tier, Store] = {}
    worker, rates = None, OffloadRates()
    with contextlib.ExitStack() as opened:  # Closed if anything here fails.
        if memory.host_pages and not memory.kv_on_host:
            store: Store = HostStore(memory.host_pages, memory.whole_page_bytes)
            opened.callback(store.close)
            stores[Tier.HOST] = store
        if memory.disk_pages:
            store = DiskStore(config.disk_kv_dir, memory.disk_pages, memory.whole_page_bytes)
            opened.callback(store.close)
            stores[Tier.DISK] = store
        if stores:
            staging = Staging(plan.shapes.kv.staging(1))
            worker = TransferWorker(
                stores,
                download=staging.download,
                upload=staging.upload,
                page_bytes=memory.whole_page_bytes,
                clock=log.now,
                staging_buffers=STAGING_BUFFERS,
            )
            opened.callback(worker.close)
            with log.phase("startup", "calibrate transfers"):
                _calibrate(rates, worker, runner, stores)
        opened.pop_all()
    manager = KVManager(
        PagePool(memory.num_pages, config.page_size),
        layout=memory.layout,
        prefix_caching=config.enable_prefix_caching,
        preemption=config.preemption,
        tiers={tier: store.num_pages for tier, store in stores.items()},
        page_bytes=memory.whole_page_bytes,
        transfer_worker=worker,
        rates=rates,
        host_pages=memory.host_kv and HostPages(memory.host_kv),
    )
    return KVExecutor(manager, worker, runner, log, stores=stores, debug=config.debug_kv)


def _calibrate(
    rates: OffloadRates, worker: TransferWorker, runner: Runner, stores: Mapping[Tier, Store]
) -> None:
    """Times transfers of one page and of many between neighbouring tiers, all still empty."""
    tiers = list(stores)
    least = min(store.num_pages for store in stores.values())
    sizes = [size for size in TRANSFER_SIZES if size <= least]  # Latency apart from bandwidth.
    for _ in range(_CALIBRATIONS):
        for above, below in zip([Tier.DEVICE, *tiers], tiers):
            for count in sizes:
                for handle in _there_and_back(worker, runner, above, below, list(range(count))):
                    us = handle.ended_us - handle.begun_us
                    rates.transferred(handle.source, handle.target, handle.num_bytes, us)


def _there_and_back(
    worker: TransferWorker, runner: Runner, above: Tier, below: Tier, pages: list[int]
) -> list[TransferHandle]:
    """Transfers pages down a tier, then from there to the device; returns both handles."""
    staging = None
    if above is Tier.DEVICE:
        worker.reserve()
        staging = runner.gather([TRASH_PAGE] * len(pages))
    handles = [_finished(worker, worker.submit(above, pages, below, pages, staging))]
    handles.append(_finished(worker, worker.submit(below, pages, Tier.DEVICE, pages)))
    for handle in handles:
        if handle.error is not None:
            raise ConfigError(
                f"the first transfer of KV pages from {handle.source.value} to "
                f"{handle.target.value} failed: {handle.error}. Fix that, or disable this tier "
                "(host_kv_bytes, disk_kv_bytes)."
            )
    handles[1].consume()
    return handles


def _finished(worker: TransferWorker, handle: TransferHandle) -> TransferHandle:
    while handle not in worker.ended():
        worker.wait(_CALIBRATION_WAIT_US)
    return handle


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
