"""Synchronous iteration over one request's deltas, in the engine's own thread."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from jaxserve.core.requests.outputs import Delta, RequestOutput
from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Request


class DeltaStream(Iterator[Delta]):
    """Deltas of one request, until it finishes. Closing or dropping the stream aborts the request.

    Several streams and calls of `generate` can share one engine: each call for more deltas steps
    the engine for all of them.
    """

    def __init__(self, engine: Engine, request: Request, open_: dict[str, Request]) -> None:
        """`open_`: requests whose output a caller still wants, by id."""
        self.request = request
        self._engine = engine
        self._open = open_
        self._ready: collections.deque[Delta] = collections.deque()

    def __next__(self) -> Delta:
        try:
            while not self._ready:
                # Another stream may have stepped the engine: drain its deltas before checking
                # for the end or making another step.
                self._ready.extend(self.request.take_deltas())
                if not self._ready:
                    if self.request.finished:
                        self._leave()
                        raise StopIteration
                    self._engine.step()
        except KeyboardInterrupt:
            self.close()
            raise
        return self._ready.popleft()

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def result(self) -> RequestOutput:
        """The finished output: runs the request to its end and drops the remaining deltas."""
        for _ in self:
            pass
        return self._engine.output(self.request)

    def close(self) -> None:
        """Abort the request, if it has not finished. Can be called twice."""
        if self._leave():
            self._engine.abort(self.request_id)

    def _leave(self) -> bool:
        """Stop waiting for the request; False if this stream no longer waited for it."""
        if self._open.get(self.request_id) is not self.request:
            return False
        del self._open[self.request_id]
        return True

    def __del__(self) -> None:
        self.close()
