"""What becomes of submitted requests, for the task that waits for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Self

from jaxserve.errors import EngineClosedError
from jaxserve.mailbox import Mailbox, Update
from jaxserve.outputs import RequestOutput


class Updates:
    """What becomes of submitted requests: (number of the prompt, its deltas or its output), until
    each has its output. Leaving the `async with` early aborts those that have not.

    Raises EngineClosedError when the engine ends.
    """

    def __init__(self, mailbox: Mailbox, num_requests: int, abandon: Callable[[], object]) -> None:
        """`abandon` aborts those of the requests that have not ended."""
        self._mailbox = mailbox
        self._left = num_requests
        self._abandon = abandon

    async def __aiter__(self) -> AsyncIterator[tuple[int, Update]]:
        while self._left:
            await self._mailbox.wait()
            for number, update in self._mailbox.take():
                self._left -= isinstance(update, RequestOutput)
                yield number, update

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Abort what has not ended. May be called twice."""
        if self._left:
            self._left = 0
            self._abandon()


async def output_of(updates: Updates) -> RequestOutput:
    """The output of the first request that ends."""
    async for _, update in updates:
        if isinstance(update, RequestOutput):
            return update
    raise EngineClosedError("the engine ended the request without an output.")


async def left_output(updates: Updates) -> RequestOutput:
    """As `output_of`. Whoever cancels it aborts the request."""
    async with updates:
        return await output_of(updates)
