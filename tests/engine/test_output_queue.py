"""OutputStream of requests on their way to an event loop: merged, and none lost."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.requests.outputs import Delta, RequestMetrics, RequestOutput
from jaxserve.engine import output_queue as output_queue_module
from jaxserve.engine.output_queue import OutputDispatcher, OutputQueue, merge

pieces = st.lists(st.tuples(st.integers(0, 2), st.text(max_size=3)), max_size=300)


def deltas_of(found) -> list[Delta]:
    return [Delta(index, text, (place,)) for place, (index, text) in enumerate(found)]


def joined(deltas, index: int):
    mine = [delta for delta in deltas if delta.index == index]
    return "".join(d.text for d in mine), [token for d in mine for token in d.token_ids]


@given(pieces)
def test_merging_loses_nothing(found):
    deltas = deltas_of(found)
    merged = merge(deltas)
    assert len(merged) == len({delta.index for delta in deltas})
    for index in range(3):
        assert joined(merged, index) == joined(deltas, index)


@given(pieces, st.data())
def test_a_reader_gets_everything_however_slow(found, data):
    async def scenario():
        loop = asyncio.get_running_loop()
        queue, dispatcher = OutputQueue(loop, True), OutputDispatcher()
        deltas, read = deltas_of(found), []
        for place, delta in enumerate(deltas):
            dispatcher.put(queue, 0, [delta])
            if data.draw(st.booleans()):
                dispatcher.send()
                await asyncio.sleep(0)
                assert len(queue._deltas.get(0, ())) <= 3 + 64 + place // 4
            if data.draw(st.integers(0, 9)) == 0:
                read += queue.take()
        end = RequestOutput("r", None, (), [], True, RequestMetrics(0))
        dispatcher.put(queue, 0, end)
        dispatcher.send()
        await asyncio.sleep(0)
        await queue.wait()
        read += queue.take()
        assert read[-1] == (0, end)
        told = [delta for _, update in read[:-1] for delta in update]
        for index in range(3):
            assert joined(told, index) == joined(deltas, index)

    asyncio.run(scenario())


@pytest.mark.parametrize("num_sequences", [1, 64, 128])
def test_a_reader_that_has_stopped_costs_time_in_proportion_to_its_answers(
    num_sequences, monkeypatch
):
    copied = []

    def counted(deltas):
        copied.append(sum(len(delta.token_ids) for delta in deltas))
        return merge(deltas)

    monkeypatch.setattr(output_queue_module, "merge", counted)

    async def scenario():
        queue = OutputQueue(asyncio.get_running_loop(), True)
        num_steps = 20_000 // num_sequences
        for step in range(num_steps):
            queue.deliver(0, [Delta(index, "", (step,)) for index in range(num_sequences)])
        assert sum(copied) < 8 * num_steps * num_sequences
        held = len(queue._deltas[0])
        assert held <= num_sequences + max(64, num_steps * num_sequences // 4) + num_sequences
        ((_, told),) = queue.take()
        assert [len(delta.token_ids) for delta in told] == [num_steps] * num_sequences

    asyncio.run(scenario())


def test_an_error_is_raised_in_the_waiting_task():
    async def scenario():
        queue, dispatcher = OutputQueue(asyncio.get_running_loop(), True), OutputDispatcher()
        dispatcher.put(queue, 0, [Delta(0, "a", (1,))])
        dispatcher.put(queue, 0, ValueError("why"))
        dispatcher.send()
        with pytest.raises(ValueError, match="why"):
            await queue.wait()

    asyncio.run(scenario())


def test_a_loop_that_has_closed_is_no_error():
    loop = asyncio.new_event_loop()
    loop.close()
    dispatcher = OutputDispatcher()
    dispatcher.put(OutputQueue(loop, True), 0, [])
    dispatcher.send()
