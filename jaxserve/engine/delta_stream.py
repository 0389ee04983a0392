"""Synchronous iteration over one request's deltas, in the caller's thread."""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterator

from jaxserve.core.requests.outputs import Delta, RequestOutput
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Request


class DeltaStream(Iterator[Delta]):
    """Deltas of one request, until it finishes. Closing or dropping the stream aborts the request.

    Several streams and calls of `generate` can share one engine: each call for more deltas steps
    the engine for all of them. Threads take turns with the engine.
    """

    def __init__(
        self,
        engine: Engine,
        request: Request,
        open_: dict[str, Request],
        lock: threading.RLock,
    ) -> None:
        """`open_`: requests whose output a caller still wants, by id. `lock`: held, by a thread
        that may hold it already, while it uses the engine."""
        self.request = request
        self._engine = engine
        self._open = open_
        self._lock = lock
        self._ready: collections.deque[Delta] = collections.deque()

    def __next__(self) -> Delta:
        try:
            while not self._ready:
                with self._lock:
                    self._take()
        except KeyboardInterrupt:
            self.close()
            raise
        return self._ready.popleft()

    def _take(self) -> None:
        """Take the deltas that are there, or step the engine. Raises StopIteration at the end."""
        # Another stream may have stepped the engine: drain its deltas before checking for the end
        # or making another step.
        self._ready.extend(self.request.take_deltas())
        if not self._ready:
            if self.request.finished:
                self._leave()
                raise StopIteration
            self._engine.step()

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def result(self) -> RequestOutput:
        """The finished output: runs the request to its end and drops the remaining deltas."""
        for _ in self:
            pass
        with self._lock:
            return self._engine.output(self.request)

    def close(self) -> None:
        """Abort the request, if it has not finished. Can be called twice."""
        with self._lock:
            if self._leave():
                self._engine.abort(self.request_id)

    def _leave(self) -> bool:
        """Stop waiting for the request; False if this stream no longer waited for it."""
        if self._open.get(self.request_id) is not self.request:
            return False
        return self._open.pop(self.request_id, None) is not None

    def __del__(self) -> None:
        # Python may collect this in any thread and within a step. It must not wait for the lock of
        # another thread, which may need what this one holds, nor abort a request within a step.
        # Then the request runs to its end.
        if not self._lock._is_owned() and self._lock.acquire(blocking=False):
            try:
                self.close()
            finally:
                self._lock.release()
        else:
            self._leave()
