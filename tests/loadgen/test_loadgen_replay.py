"""The open loop, with real sleeps and answers that never come in time."""

from __future__ import annotations

import asyncio

from jaxserve.loadgen.replay import replay
from jaxserve.loadgen.timed_response import TimedResponse
from jaxserve.loadgen.trace import TraceRequest


def load(*arrivals_us):
    return [TraceRequest(us, 4, 4) for us in arrivals_us]


def place_of(place, request):
    return place


def test_requests_are_sent_without_waiting_for_earlier_responses():
    """The first answer comes when all have been asked for; in a closed loop it never would."""
    requests = load(0, 20_000, 20_000, 60_000)
    done = []

    async def run():
        asked = asyncio.Barrier(len(requests))

        async def send(place):
            await asked.wait()
            return TimedResponse((1,), end_us=1, output_tokens=place)

        return await replay(requests, place_of, send, lambda *counts: done.append(counts))

    results = asyncio.run(run())
    assert [result.response.output_tokens for result in results] == [0, 1, 2, 3]
    assert [result.request for result in results] == requests
    # Timers of event loops have a resolution of a millisecond.
    assert all(result.lag_us >= -1_000 for result in results)
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_generator_that_is_held_up_says_so():
    import time

    def slow_body(place, request):
        time.sleep(0.05)

    async def send(made):
        return TimedResponse((), end_us=0)

    results = asyncio.run(replay(load(0, 0, 0), slow_body, send, lambda *counts: None))
    assert [result.lag_us >= 50_000 * place for place, result in enumerate(results, start=1)]
    assert results[-1].lag_us >= 150_000


def test_being_interrupted_keeps_what_was_done():
    async def run():
        first_done = asyncio.Event()

        async def send(place):
            if place:
                await asyncio.Event().wait()
            first_done.set()
            return TimedResponse((1,), end_us=1)

        running = asyncio.create_task(
            replay(load(0, 0, 3_600_000_000), place_of, send, lambda *counts: None)
        )
        await first_done.wait()
        await asyncio.sleep(0)
        running.cancel()
        return await running

    assert [result.place for result in asyncio.run(run())] == [0]
