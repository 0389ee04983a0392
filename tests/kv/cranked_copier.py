"""A copier without a will of its own."""

from __future__ import annotations

from collections import deque

import numpy as np

from jaxserve.kv.copier import Copier, Ticket


class CrankedCopier(Copier):
    """A copier whose moves are begun and ended one at a time by the test, and fail on demand."""

    fails = False

    def _run(self, queue: deque[Ticket]) -> None:
        """The threads have nothing to do."""

    def can_begin(self, to_device: bool) -> bool:
        """Whether there is a move in one direction, and a buffer for it."""
        return bool(self._to_device and self._free_in if to_device else self._from_device)

    def begin(self, to_device: bool) -> Ticket:
        return self._begin(self._to_device if to_device else self._from_device)

    def end(self, ticket: Ticket, *, fails: bool = False) -> None:
        self.fails = fails
        self._carry_out(ticket)

    @property
    def free_buffers(self) -> tuple[int, int]:
        """Those for moves to the device, and for moves away from it."""
        return self._free_in, self._free_out

    def _copy(self, ticket: Ticket) -> np.ndarray | None:
        if self.fails:
            raise OSError("the medium refuses")
        return super()._copy(ticket)
