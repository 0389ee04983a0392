"""Output queues from the engine thread to asyncio tasks, posted once per step.

The engine thread posts updates with `OutputDispatcher`; a task reads the updates of its requests
from an `OutputQueue`, through `OutputStream`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Self

from jaxserve.core.errors import EngineClosedError
from jaxserve.core.requests.outputs import Delta, RequestOutput

Update = list[Delta] | RequestOutput
QueuedUpdate = tuple["OutputQueue", int, Update | BaseException]

_MAX_DELTAS = 64
"""Unread deltas of one request before they are merged."""

_TOKENS_PER_DELTA = 4
"""Merged tokens per delta that may be queued before the next merge: longer outputs are merged less
often, so a token is copied a few times at any length."""


class OutputQueue:
    """The updates of one task's requests, which are numbered.

    A slow or stopped reader costs no more memory than its outputs: unread deltas are merged.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, wants_deltas: bool) -> None:
        self.loop = loop
        self.wants_deltas = wants_deltas
        self._filled = asyncio.Event()
        self._deltas: dict[int, list[Delta]] = {}
        self._merge_at: dict[int, int] = {}
        self._outputs: list[tuple[int, RequestOutput]] = []
        self._error: BaseException | None = None

    def deliver(self, number: int, update: Update | BaseException) -> None:
        if isinstance(update, BaseException):
            self._error = update
        elif isinstance(update, RequestOutput):
            self._outputs.append((number, update))
        else:
            deltas = self._deltas.setdefault(number, [])
            deltas += update
            if len(deltas) > self._merge_at.get(number, _MAX_DELTAS):
                merged = self._deltas[number] = merge(deltas)
                num_tokens = sum(len(delta.token_ids) for delta in merged)
                room = max(_MAX_DELTAS, num_tokens // _TOKENS_PER_DELTA)
                self._merge_at[number] = len(merged) + room
        self._filled.set()

    async def wait(self) -> None:
        """Waits until an update is delivered. Raises a delivered error."""
        await self._filled.wait()
        if self._error is not None:
            raise self._error

    def take(self) -> list[tuple[int, Update]]:
        """The updates since the last call: for each request its deltas, merged to one per
        sequence, and last the outputs of finished requests."""
        self._filled.clear()
        deltas, self._deltas = self._deltas, {}
        self._merge_at.clear()
        outputs, self._outputs = self._outputs, []
        gained = ((number, merge(found)) for number, found in deltas.items() if found)
        return [*gained, *outputs]


class OutputDispatcher:
    """Collects the updates of a step and wakes each event loop once, not once per token."""

    def __init__(self) -> None:
        self._messages: dict[asyncio.AbstractEventLoop, list[QueuedUpdate]] = {}

    def put(self, queue: OutputQueue, number: int, update: Update | BaseException) -> None:
        self._messages.setdefault(queue.loop, []).append((queue, number, update))

    def send(self) -> None:
        messages, self._messages = self._messages, {}
        for loop, of_loop in messages.items():
            with contextlib.suppress(RuntimeError):  # The loop has closed.
                loop.call_soon_threadsafe(_deliver, of_loop)


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """One delta per sequence that has any."""
    by_index: dict[int, list[Delta]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    return [some[0] if len(some) == 1 else _merged(some) for some in by_index.values()]


def _merged(deltas: list[Delta]) -> Delta:
    scored = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    last = deltas[-1]
    return Delta(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=[entry for entries in scored for entry in entries] if scored else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )


def _deliver(messages: list[QueuedUpdate]) -> None:
    for queue, number, update in messages:
        queue.deliver(number, update)


class OutputStream:
    """The updates of submitted requests: (number of the prompt, its deltas or its output), until
    each has its output. Leaving the `async with` early aborts the unfinished ones.

    Raises EngineClosedError when the engine closes.
    """

    def __init__(
        self, queue: OutputQueue, num_requests: int, abandon: Callable[[], object]
    ) -> None:
        """`abandon` aborts the unfinished requests."""
        self._queue = queue
        self._left = num_requests
        self._abandon = abandon

    async def __aiter__(self) -> AsyncIterator[tuple[int, Update]]:
        while self._left:
            await self._queue.wait()
            for number, update in self._queue.take():
                self._left -= isinstance(update, RequestOutput)
                yield number, update

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Abort the unfinished requests. Can be called twice."""
        if self._left:
            self._left = 0
            self._abandon()


async def output_of(updates: OutputStream) -> RequestOutput:
    """The output of the first request that finishes."""
    async for _, update in updates:
        if isinstance(update, RequestOutput):
            return update
    raise EngineClosedError("the engine ended the request without an output.")


async def left_output(updates: OutputStream) -> RequestOutput:
    """As `output_of`. Cancelling it aborts the request."""
    async with updates:
        return await output_of(updates)
