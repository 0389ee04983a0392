"""The background tasks of a router, and work that ends early."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any, TypeVar

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


async def unless(
    ended: Collection[asyncio.Future[None]], work: Coroutine[Any, Any, _T]
) -> _T | None:
    """What `work` returns or raises; None, with `work` cancelled, if one of `ended` is done
    before."""
    if any(each.done() for each in ended):
        work.close()
        return None
    working = asyncio.ensure_future(work)
    try:
        await asyncio.wait({working, *ended}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        await asyncio.wait({working})


class Tasks:
    """Tasks that run until they end or `close` ends them. A router does not outlive a bug."""

    def __init__(self, fail: Callable[[BaseException], object]) -> None:
        """`fail` is called with what a task has raised."""
        self._fail = fail
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def close(self) -> None:
        """Cancel all, and wait for their end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task of the router failed", exc_info=error)
            self._fail(error)
