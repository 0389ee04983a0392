"""One request's deltas, for whoever asks for them in the engine's own thread."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from jaxserve.engine.engine import Engine
from jaxserve.engine.request import Request
from jaxserve.outputs import Delta, RequestOutput


class DeltaStream(Iterator[Delta]):
    """Deltas of one request, until it ends. Closing or dropping the stream aborts what is left.

    Several streams and calls of `generate` may be under way on one engine: whoever asks for more
    steps it for all of them.
    """

    def __init__(self, engine: Engine, request: Request, open_: dict[str, Request]) -> None:
        """`open_` are the requests whose outputs are still wanted, by id."""
        self.request = request
        self._engine = engine
        self._open = open_
        self._ready: collections.deque[Delta] = collections.deque()

    def __next__(self) -> Delta:
        try:
            while not self._ready:
                # Others may have stepped the engine since: what came meanwhile is taken before
                # the end is believed, or another step made.
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
        """The finished output: runs the request to its end, and skips the deltas that are left."""
        for _ in self:
            pass
        return self._engine.output(self.request)

    def close(self) -> None:
        """End the request, if it has not ended. May be called twice."""
        if self._leave():
            self._engine.abort(self.request_id)

    def _leave(self) -> bool:
        """Nobody waits for the request any longer; whether somebody did."""
        if self._open.get(self.request_id) is not self.request:
            return False
        del self._open[self.request_id]
        return True

    def __del__(self) -> None:
        self.close()
