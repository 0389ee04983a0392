"""Transfers KV pages between tiers in background threads.

The one primitive is `TransferQueue.submit`, which returns a `TransferHandle`. The device's KV pool
is never touched here: a program gathers pages into a *staging* array before a transfer from the
device, and another scatters it into the pool after a transfer to the device. The engine thread
dispatches both, in order with its steps, so that no copy sees a partly written page and no step
reads a page that has not arrived (the swap manager of FastSwitch, Shen et al. 2024, with staging
arrays instead of copies to and from the pool itself).

`TransferQueue` holds the state, `TransferWorker` the threads; the simulator has virtual time
instead.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.core.errors import ConfigError, EngineClosedError, JaxserveError
from jaxserve.kv.offload.stores import Store
from jaxserve.kv.tier import Tier


class TransferError(JaxserveError):
    """An invalid transfer, or a handle used in the wrong state: a bug of the caller."""


class TransferState(enum.StrEnum):
    """State of a transfer. All but PENDING are final."""

    PENDING = "pending"
    LANDED = "landed"
    FAILED = "failed"
    ABANDONED = "abandoned"


@dataclasses.dataclass(eq=False)
class TransferHandle:
    """Handle of one transfer, created by `TransferQueue.submit`.

    `begun_us` is when a thread began it (until then: when it was requested). None of its pages may
    be reused before it has ended (`ended_us`). `error` is the cause of a failure; the target pages
    are then invalid, and the source pages untouched. `staged` is the device array with one row per
    page, as returned by `upload`, of a landed transfer to the device, until it is consumed or
    abandoned.
    """

    source: Tier
    target: Tier
    source_pages: tuple[int, ...]
    target_pages: tuple[int, ...]
    num_bytes: int
    begun_us: int
    ended_us: int | None = None
    error: str | None = None
    staged: Any = dataclasses.field(default=None, repr=False)
    _worker: TransferQueue = dataclasses.field(kw_only=True, repr=False)
    _gathered: Any = dataclasses.field(default=None, kw_only=True, repr=False)
    _holds_buffer: bool = dataclasses.field(default=False, kw_only=True, repr=False)
    _abandoned: bool = dataclasses.field(default=False, kw_only=True, repr=False)

    @property
    def state(self) -> TransferState:
        if self.ended_us is None:
            return TransferState.PENDING
        if self.error is not None:
            return TransferState.FAILED
        return TransferState.ABANDONED if self._abandoned else TransferState.LANDED

    def abandon(self) -> None:
        """Marks that no caller waits for this transfer any more.

        A transfer that no thread has begun ends immediately. One in flight stays pending, with its
        pages in use, until the thread is done with them; its staged array is dropped. One that has
        ended keeps its state and only drops its staged array. In each case its staging buffer is
        returned.
        """
        self._worker._abandon(self)

    def consume(self) -> Any:
        """Takes the staged array, once, and returns its staging buffer to the worker.

        Raises TransferError when nothing is staged: not landed, not to the device, or taken.
        """
        return self._worker._consume(self)


class TransferQueue:
    """Queued transfers and their staging buffers; a subclass runs the transfers.

    There are two queues, one for transfers to the device, one for all others, so that fetches never
    wait behind saves. Each is FIFO; between the two there is no order, and the owner must ensure
    that no page of a pending handle is reused.

    At most `staging_buffers` staging arrays exist in each direction. A transfer to the device takes
    one when it begins and holds it until `TransferHandle.consume`; for a transfer from the device
    the caller takes one by `reserve` before the gather, and it is returned when the transfer ends.
    So a caller that waits in `reserve`, and consumes nothing meanwhile, cannot deadlock.
    """

    def __init__(
        self,
        tiers: Iterable[Tier],
        *,
        page_bytes: int,
        clock: Callable[[], int],
        staging_buffers: int = 2,
    ) -> None:
        """`tiers` are those below the device; `clock` gives integer microseconds.

        Raises ConfigError without a staging buffer.
        """
        if staging_buffers < 1:
            raise ConfigError(f"staging_buffers is {staging_buffers}; it must be at least 1")
        self._tiers = frozenset(tiers)
        self._page_bytes = page_bytes
        self._clock = clock
        # Guards all fields below and every handle; notified on every change that threads wait for.
        self._changed = threading.Condition()
        self._free_in = self._free_out = staging_buffers
        self._reserved_buffers = 0
        self._to_device: deque[TransferHandle] = deque()
        self._from_device: deque[TransferHandle] = deque()
        self._num_pending = 0
        self._ended: list[TransferHandle] = []
        self._closed = False

    def submit(
        self,
        source: Tier,
        source_pages: Sequence[int],
        target: Tier,
        target_pages: Sequence[int],
        staging: Any = None,
    ) -> TransferHandle:
        """Enqueues a copy of `source_pages` to `target_pages`, and returns immediately.

        `staging` is the array `[>= pages, ...]` of a gather already dispatched, for transfers from
        the device; it uses up one `reserve`.

        Raises TransferError for an invalid transfer, EngineClosedError after `close`.
        """
        self._check(source, source_pages, target, target_pages, staging)
        handle = TransferHandle(
            source,
            target,
            tuple(source_pages),
            tuple(target_pages),
            num_bytes=len(source_pages) * self._page_bytes,
            begun_us=self._clock(),
            _worker=self,
            _gathered=staging,
        )
        with self._changed:
            if self._closed:
                raise EngineClosedError("the transfer worker is closed")
            if source is Tier.DEVICE:
                if not self._reserved_buffers:
                    raise TransferError(
                        "no staging buffer is reserved; call reserve() before a gather"
                    )
                self._reserved_buffers -= 1
                handle._holds_buffer = True
            self._num_pending += 1
            self._queue_of(handle).append(handle)
            self._changed.notify_all()
        return handle

    def reserve(self, timeout_us: int = 0) -> bool:
        """Reserves a staging buffer for the next gather; False if none is free in time."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._free_out, timeout_us / 1e6):
                return False
            self._free_out -= 1
            self._reserved_buffers += 1
            return True

    def ended(self) -> list[TransferHandle]:
        """The handles that ended since the last call, in order of ending."""
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def wait(self, timeout_us: int) -> bool:
        """Waits for a handle that `ended` has not yet returned.

        False on timeout, or immediately when none is pending.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._num_pending, timeout_us / 1e6)
            return bool(self._ended)

    def close(self) -> None:
        """Fails the transfers not begun; idempotent. `ended` still returns ended handles."""
        with self._changed:
            self._closed = True
            for queue in (self._to_device, self._from_device):
                while queue:
                    self._end(
                        queue.popleft(),
                        error="the transfer worker was closed before the transfer began",
                    )
            self._changed.notify_all()

    def _check(
        self,
        source: Tier,
        source_pages: Sequence[int],
        target: Tier,
        target_pages: Sequence[int],
        staging: Any,
    ) -> None:
        names = f"{source.value} to {target.value}"
        if source is target is Tier.DEVICE:
            raise TransferError(f"{names}: copies within the device are done by a program")
        for tier in (source, target):
            if tier is not Tier.DEVICE and tier not in self._tiers:
                raise TransferError(f"{names}: this transfer worker has no {tier.value} tier")
        if not source_pages or len(source_pages) != len(target_pages):
            raise TransferError(
                f"{names}: {len(source_pages)} source and {len(target_pages)} target pages; "
                f"give the same number of each, at least one"
            )
        if (staging is not None) != (source is Tier.DEVICE):
            raise TransferError(
                f"{names}: a staging array is required for transfers from the device, and only them"
            )

    def _queue_of(self, handle: TransferHandle) -> deque[TransferHandle]:
        return self._to_device if handle.target is Tier.DEVICE else self._from_device

    def _can_begin(self, queue: deque[TransferHandle]) -> bool:
        """Whether a queue has a transfer, and a staging buffer for it."""
        return bool(queue) and (queue is self._from_device or self._free_in > 0)

    def _begin(self, queue: deque[TransferHandle]) -> TransferHandle:
        """Dequeues the next handle of a queue that `_can_begin`."""
        handle = queue.popleft()
        if handle.target is Tier.DEVICE:
            self._free_in -= 1
            handle._holds_buffer = True
        handle.begun_us = self._clock()
        return handle

    def _end(self, handle: TransferHandle, staged: Any = None, error: str | None = None) -> None:
        with self._changed:
            handle._gathered = None
            handle.error = error
            if staged is None or handle._abandoned:
                self._give_back(handle)
            else:
                handle.staged = staged
            handle.ended_us = self._clock()  # last: it publishes the other fields
            self._num_pending -= 1
            self._ended.append(handle)
            self._changed.notify_all()

    def _give_back(self, handle: TransferHandle) -> None:
        if handle._holds_buffer:
            handle._holds_buffer = False
            self._free_in += handle.target is Tier.DEVICE
            self._free_out += handle.target is not Tier.DEVICE
            self._changed.notify_all()

    def _abandon(self, handle: TransferHandle) -> None:
        with self._changed:
            if handle.ended_us is not None:
                handle.staged = None
                self._give_back(handle)
                return
            handle._abandoned = True
            queue = self._queue_of(handle)
            if handle in queue:
                queue.remove(handle)
                self._end(handle)

    def _consume(self, handle: TransferHandle) -> Any:
        with self._changed:
            if handle.staged is None:
                raise TransferError(f"nothing is staged by {handle} ({handle.state})")
            staged, handle.staged = handle.staged, None
            self._give_back(handle)
            return staged


class TransferWorker(TransferQueue):
    """Runs transfers in two threads, one for each queue."""

    def __init__(
        self,
        stores: Mapping[Tier, Store],
        *,
        download: Callable[[Any], np.ndarray],
        upload: Callable[[np.ndarray], Any],
        page_bytes: int,
        clock: Callable[[], int],
        staging_buffers: int = 2,
    ) -> None:
        """Starts the threads.

        `download` copies a staging array to host memory, in the layout of `Store.write`; `upload`
        copies the result of `Store.read` to a new staging array, which may have padding rows.
        Both run in the transfer worker's threads and return when the copy is done.
        """
        super().__init__(
            stores, page_bytes=page_bytes, clock=clock, staging_buffers=staging_buffers
        )
        self._stores = dict(stores)
        self._download = download
        self._upload = upload
        self._threads = [
            threading.Thread(target=self._run, args=(queue,), name=name, daemon=True)
            for queue, name in (
                (self._to_device, "jaxserve-kv-in"),
                (self._from_device, "jaxserve-kv-out"),
            )
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Finishes transfers in flight, fails those not begun, and stops the threads; idempotent.

        The stores stay open. `ended` still returns ended handles.
        """
        super().close()
        for thread in self._threads:
            thread.join()

    def _run(self, queue: deque[TransferHandle]) -> None:
        while (handle := self._wait_for(queue)) is not None:
            self._carry_out(handle)

    def _wait_for(self, queue: deque[TransferHandle]) -> TransferHandle | None:
        """The next handle of a queue, begun; None once closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._can_begin(queue))
            return None if self._closed else self._begin(queue)

    def _carry_out(self, handle: TransferHandle) -> None:
        try:
            staged = self._copy(handle)
        except Exception as error:  # any error fails only this transfer
            self._end(handle, error=f"{type(error).__name__}: {error}")
        else:
            self._end(handle, staged)

    def _copy(self, handle: TransferHandle) -> Any:
        """Copies the pages; returns the staged array of a transfer to the device, else None."""
        if handle.source is Tier.DEVICE:
            payload = self._download(handle._gathered)
        else:
            payload = self._stores[handle.source].read(handle.source_pages)
        if handle._abandoned:
            return None
        if handle.target is Tier.DEVICE:
            return self._upload(payload)
        return self._stores[handle.target].write(handle.target_pages, payload)
