"""From the engine's thread to event loops: what requests gained, all of a step in one call."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

from jaxserve.outputs import Delta, RequestOutput

Update = list[Delta] | RequestOutput
Letter = tuple["Mailbox", int, Update | BaseException]

_MOST_DELTAS = 64
"""Of one request, that come unread before they are merged."""

_TOKENS_PER_DELTA = 4
"""So many merged tokens let one more delta come before all are merged again: the more there is to
copy, the rarer it is, and a token is copied a few times whatever the length."""


class Mailbox:
    """What one task waits for: the updates of its requests, which have numbers here.

    A reader that is slow, or has stopped reading, costs the memory of its answers and no more:
    deltas that lie here are merged.
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
            if len(deltas) > self._merge_at.get(number, _MOST_DELTAS):
                merged = self._deltas[number] = merge(deltas)
                num_tokens = sum(len(delta.token_ids) for delta in merged)
                room = max(_MOST_DELTAS, num_tokens // _TOKENS_PER_DELTA)
                self._merge_at[number] = len(merged) + room
        self._filled.set()

    async def wait(self) -> None:
        """Until something is delivered. Raises the error if that is one."""
        await self._filled.wait()
        if self._error is not None:
            raise self._error

    def take(self) -> list[tuple[int, Update]]:
        """What has been delivered since the last call: of each request all its deltas as one for
        each sequence, then its output if it has ended."""
        self._filled.clear()
        deltas, self._deltas = self._deltas, {}
        self._merge_at.clear()
        outputs, self._outputs = self._outputs, []
        gained = ((number, merge(found)) for number, found in deltas.items() if found)
        return [*gained, *outputs]


class Outbox:
    """Letters to mailboxes, kept until the step is over: a wake-up a loop, not one a token."""

    def __init__(self) -> None:
        self._letters: dict[asyncio.AbstractEventLoop, list[Letter]] = {}

    def put(self, mailbox: Mailbox, number: int, update: Update | BaseException) -> None:
        self._letters.setdefault(mailbox.loop, []).append((mailbox, number, update))

    def send(self) -> None:
        letters, self._letters = self._letters, {}
        for loop, of_loop in letters.items():
            with contextlib.suppress(RuntimeError):  # The loop has closed: nobody reads any more.
                loop.call_soon_threadsafe(_deliver, of_loop)


def merge(deltas: Iterable[Delta]) -> list[Delta]:
    """One delta for each sequence that has some."""
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


def _deliver(letters: list[Letter]) -> None:
    for mailbox, number, update in letters:
        mailbox.deliver(number, update)
