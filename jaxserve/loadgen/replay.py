"""Sending a load open-loop: each request at its own time, whatever became of those before it.

A closed loop, which waits for answers before it asks again, slows down with the server and so
hides what its users would have met.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from jaxserve.loadgen.answer import Answer, now_us
from jaxserve.loadgen.results import RequestResult
from jaxserve.loadgen.trace import TraceRequest

Body = TypeVar("Body")


async def replay(
    requests: Sequence[TraceRequest],
    body: Callable[[int, TraceRequest], Body],
    send: Callable[[Body], Awaitable[Answer]],
    progress: Callable[[int, int], None],
) -> list[RequestResult]:
    """Send every request at its arrival time, and wait for all answers.

    `body` makes what is sent, from the request's place and the request; `progress` is told how
    many of all are done. Being cancelled ends the load early: the results are then those of the
    requests that were done.
    """
    results: list[RequestResult] = []

    async def run(place: int, request: TraceRequest, made: Body) -> None:
        sent_us = now_us() - begin_us
        answer = await send(made)
        results.append(RequestResult(place, request, sent_us, answer))
        progress(len(results), len(requests))

    begin_us = now_us()
    try:
        async with asyncio.TaskGroup() as group:
            for place, request in enumerate(requests):
                # Made before its time has come, so that it costs none then.
                made = body(place, request)
                await asyncio.sleep(max(0, request.arrival_us - (now_us() - begin_us)) / 1e6)
                group.create_task(run(place, request, made))
    except asyncio.CancelledError:
        # Ctrl-C: what was measured so far is worth telling.
        pass
    return sorted(results, key=lambda result: result.place)
