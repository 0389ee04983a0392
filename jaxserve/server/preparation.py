"""Threads in which requests are prepared: templates, tokenizers and schema checks are slow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from starlette.requests import Request

from jaxserve.core.errors import OverloadedError
from jaxserve.protocol.errors import UnavailableError
from jaxserve.protocol.model import Model
from jaxserve.server.disconnect import cancel_on_disconnect

DEADLINE_S = 30.0
"""Time limit for a preparation, its time in the queue included."""

LARGE_BYTES = 1 << 17
"""Size of a body that takes tenths of a second to tokenize."""

PreparationKind = Literal["small", "tools", "large"]
"""Requests that take long to prepare have threads of their own: others do not wait for them."""

NUM_THREADS: dict[PreparationKind, int] = {"small": 4, "tools": 2, "large": 2}

T = TypeVar("T")


class PreparationPool:
    """A few threads with a bounded queue. For one event loop."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, "jaxserve-request")
        self._open: list[Future[Any]] = []
        self._callers: set[asyncio.Future[Any]] = set()
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether work runs or waits, including work whose caller has left."""
        return not all(future.done() for future in self._open)

    async def run(self, max_open: int, work: Callable[..., T], *arguments: Any) -> T:
        """The result of `work(*arguments)`, in a thread. What has begun cannot be stopped: it keeps
        its thread if it misses the deadline, or if the caller is cancelled.

        Raises OverloadedError if `max_open` calls run or wait, or at the deadline, UnavailableError
        when closed, and what `work` raises.
        """
        self._open = [future for future in self._open if not future.done()]
        if len(self._open) >= max_open:
            raise OverloadedError(f"{len(self._open)} requests are being prepared; retry later.")
        if self._closed:
            raise stopping_error()
        future = self._threads.submit(work, *arguments)
        self._open.append(future)
        result = asyncio.wrap_future(future)
        self._callers.add(result)
        try:
            async with asyncio.timeout(DEADLINE_S):
                return await result
        except asyncio.CancelledError:
            if self._closed and not asyncio.current_task().cancelling():
                raise stopping_error() from None
            raise
        except TimeoutError:
            raise OverloadedError(
                f"the request could not be prepared within {DEADLINE_S:g} s; retry later, or send "
                "a shorter one."
            ) from None
        finally:
            self._callers.discard(result)

    def close(self) -> None:
        """Refuse all callers, including those that wait. Does not wait for running work."""
        self._closed = True
        for result in self._callers:
            result.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)


def stopping_error() -> UnavailableError:
    """The error during shutdown."""
    return UnavailableError("the server is stopping; retry on another server.")


async def prepared(
    request: Request,
    work: Callable[[Model], T],
    has_tools: bool = False,
    more_bytes: int = 0,
) -> T:
    """The result of `work` on the served model, in a thread. It reads the body and `more_bytes`. If
    the client hangs up meanwhile, work that has not begun is dropped.

    Raises ClientGoneError, and as `Service.prepare` does.
    """
    kind = kind_of(len(await request.body()) + more_bytes, has_tools)
    return await cancel_on_disconnect(
        request.receive, request.app.state.service.prepare(work, kind)
    )


def kind_of(num_bytes: int, has_tools: bool) -> PreparationKind:
    """The kind of a request that has so many bytes to prepare."""
    if num_bytes > LARGE_BYTES:
        return "large"
    return "tools" if has_tools else "small"
