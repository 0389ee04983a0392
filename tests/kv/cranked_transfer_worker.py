"""A transfer worker without a will of its own."""

from __future__ import annotations

from collections import deque

import numpy as np

from jaxserve.kv.offload.transfer_worker import TransferHandle, TransferWorker


class CrankedTransferWorker(TransferWorker):
    """A transfer worker whose moves the test begins and ends one by one, and fails on demand."""

    fails = False

    def _run(self, queue: deque[TransferHandle]) -> None:
        """The threads have nothing to do."""

    def can_begin(self, to_device: bool) -> bool:
        """Whether there is a move in one direction, and a buffer for it."""
        return self._can_begin(self._to_device if to_device else self._from_device)

    def begin(self, to_device: bool) -> TransferHandle:
        return self._begin(self._to_device if to_device else self._from_device)

    def end(self, handle: TransferHandle, *, fails: bool = False) -> None:
        self.fails = fails
        self._carry_out(handle)

    @property
    def free_buffers(self) -> tuple[int, int]:
        """Those for moves to the device, and for moves away from it."""
        return self._free_in, self._free_out

    def _copy(self, handle: TransferHandle) -> np.ndarray | None:
        if self.fails:
            raise OSError("the medium refuses")
        return super()._copy(handle)
