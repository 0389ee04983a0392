"""Replay a load open-loop: each request is sent at its arrival time, regardless of earlier ones.

A closed loop, which waits for responses before it sends more, slows down with the server and so
hides the queueing delay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from jaxserve.loadgen.results import RequestResult
from jaxserve.loadgen.timed_response import TimedResponse, now_us
from jaxserve.loadgen.trace import TraceRequest

Body = TypeVar("Body")


async def replay(
    requests: Sequence[TraceRequest],
    body: Callable[[int, TraceRequest], Body],
    send: Callable[[Body], Awaitable[TimedResponse]],
    progress: Callable[[int, int], None],
) -> list[RequestResult]:
    """Send every request at its arrival time, and wait for all responses.

    `body` builds the body from the request's index and the request; `progress` is called with the
    number of requests done and the total. Cancelling ends the load early and returns the results
    of the requests that are done.
    """
    results: list[RequestResult] = []

    async def run(place: int, request: TraceRequest, made: Body) -> None:
        sent_us = now_us() - begin_us
        response = await send(made)
        results.append(RequestResult(place, request, sent_us, response))
        progress(len(results), len(requests))

    begin_us = now_us()
    try:
        async with asyncio.TaskGroup() as group:
            for place, request in enumerate(requests):
                # Build the body ahead of time, so that the request is not sent late.
                made = body(place, request)
                wait_us = request.arrival_us - (now_us() - begin_us)
                await asyncio.sleep(max(0, wait_us + 1) / 1e6)  # timers may fire a tick early
                group.create_task(run(place, request, made))
    except asyncio.CancelledError:
        # Ctrl-C: return the results so far.
        pass
    return sorted(results, key=lambda result: result.place)
