"""The engine behind an event loop: many tasks at once, ended in every way."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest
from patience import PATIENCE_S
from tiny_engines import LONGEST, assert_idle

from jaxserve.async_engine import AsyncEngine
from jaxserve.core.errors import EngineClosedError, RequestError, StepTimeoutError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.engine import watchdog

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)


@pytest.fixture
def engine(llama):
    threads = threading.active_count()
    engine = AsyncEngine.load(llama.path, **llama.settings())
    assert threading.active_count() == threads + 2  # of steps, and of their watchdog
    yield engine
    engine.close()
    engine.close()
    assert threading.active_count() == threads
    assert_idle(engine._engine)


@pytest.fixture
def unhurried(engine, monkeypatch):
    """The engine with steps long enough that an endless request still runs when it is ended."""
    read = engine._engine._runner.read

    def late(step):
        time.sleep(0.02)
        return read(step)

    monkeypatch.setattr(engine._engine._runner, "read", late)
    return engine


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, timeout=PATIENCE_S))


async def idle(engine):
    """Waits until the engine's thread has done what it was told."""
    while engine._engine.scheduler.has_work:
        await asyncio.sleep(0.005)
    assert engine._engine.kv.pool.num_used == 0


def test_concurrent_tasks_equal_the_oracle(llama, engine):
    async def streamed(prompt):
        deltas = [delta async for delta in engine.stream(prompt, GREEDY)]
        assert deltas[-1].finish_reason == "length"
        return [token for delta in deltas for token in delta.token_ids]

    async def generated(prompt):
        return list((await engine.generate(prompt, GREEDY)).outputs[0].token_ids)

    async def everything():
        streams = [streamed(prompt) for prompt in llama.prompts]
        wholes = [generated(prompt) for prompt in llama.prompts]
        return await asyncio.gather(*streams, *wholes)

    assert run(everything()) == llama.answers * 2


def test_cancelling_a_task_aborts_its_request_alone(llama, unhurried):
    async def scenario():
        victims = [asyncio.create_task(unhurried.generate(p, ENDLESS)) for p in llama.prompts[:6]]
        survivor = asyncio.create_task(unhurried.generate(llama.prompts[9], GREEDY))
        await asyncio.sleep(0.02)
        for victim in victims:
            victim.cancel()
        for victim in victims:
            with pytest.raises(asyncio.CancelledError):
                await victim
        output = await survivor
        await idle(unhurried)
        return output

    assert list(run(scenario()).outputs[0].token_ids) == llama.answers[9]
    assert unhurried.get_metrics()["vllm:request_success_total"].value["abort"] == 6


def test_leaving_a_stream_early_aborts_its_request(llama, unhurried):
    async def scenario():
        async with contextlib.aclosing(unhurried.stream(llama.prompts[0], ENDLESS)) as deltas:
            async for delta in deltas:
                assert delta.token_ids[0] == llama.answers[0][0]
                break
        await idle(unhurried)

    run(scenario())
    assert unhurried.get_metrics()["vllm:request_success_total"].value["abort"] == 1


def test_abort_ends_a_request_with_what_it_has(llama, unhurried):
    async def scenario():
        tokens = []
        async for delta in unhurried.stream(llama.prompts[0], ENDLESS, request_id="mine"):
            tokens += delta.token_ids
            if len(tokens) >= 3:
                await unhurried.abort("mine")
        await idle(unhurried)
        return tokens, delta

    tokens, last = run(scenario())
    assert last.finish_reason == "abort"
    assert len(tokens) >= 3
    assert tokens[:LONGEST] == llama.answers[0][: len(tokens)]


def test_a_refusal_reaches_its_task_alone(llama, engine):
    async def scenario():
        return await asyncio.gather(
            engine.generate([999], GREEDY),
            engine.generate(llama.prompts[5], GREEDY),
            engine.generate(None, GREEDY),
            return_exceptions=True,
        )

    refused, fine, also_refused = run(scenario())
    assert isinstance(refused, RequestError) and "999" in str(refused)
    assert isinstance(also_refused, RequestError)
    assert list(fine.outputs[0].token_ids) == llama.answers[5]


def test_a_call_that_fails_reaches_its_task_alone(llama, engine, monkeypatch, caplog):
    def broken():
        raise RuntimeError("no cache today")

    monkeypatch.setattr(engine._engine, "reset_prefix_cache", broken)

    async def scenario():
        running = asyncio.create_task(engine.generate(llama.prompts[9], GREEDY, "mine"))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="priority is 'high'"):
            await engine.set_priority("mine", "high")
        await engine.set_priority("mine", 3)
        await engine.reset_prefix_cache()
        return await running

    assert list(run(scenario()).outputs[0].token_ids) == llama.answers[9]
    assert engine.failure is None
    assert "no cache today" in caplog.text


def test_an_id_in_use_is_refused_and_its_owner_goes_on(llama, engine):
    async def scenario():
        first = asyncio.create_task(engine.generate(llama.prompts[9], GREEDY, request_id="same"))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="'same' is in use"):
            await engine.generate(llama.prompts[9], GREEDY, request_id="same")
        return await first

    assert list(run(scenario()).outputs[0].token_ids) == llama.answers[9]


def test_closing_ends_what_runs_and_refuses_what_comes(llama, engine):
    async def scenario():
        tasks = [asyncio.create_task(engine.generate(p, ENDLESS)) for p in llama.prompts[:6]]
        await asyncio.sleep(0.02)
        await asyncio.to_thread(engine.close)
        for task in tasks:
            with pytest.raises(EngineClosedError, match="closed"):
                await task
        with pytest.raises(EngineClosedError, match="make a new one"):
            await engine.generate(llama.prompts[0], GREEDY)

    run(scenario())


def test_an_error_of_the_device_reaches_every_task(llama, engine, monkeypatch):
    def broken(step):
        raise RuntimeError("the device fell off the bus")

    monkeypatch.setattr(engine._engine._runner, "read", broken)

    async def scenario():
        tasks = [engine.generate(prompt, GREEDY) for prompt in llama.prompts[:6]]
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, EngineClosedError)
            assert "fell off the bus" in str(outcome)
        with pytest.raises(EngineClosedError) as refusal:
            await engine.generate(llama.prompts[0], GREEDY)
        assert "fell off the bus" in str(refusal.value.__cause__)

    run(scenario())


def test_a_step_that_hangs_ends_the_engine_and_all_requests(llama, monkeypatch):
    monkeypatch.setattr(watchdog, "TICK_S", 0.02)
    go_on = threading.Event()
    engine = AsyncEngine.load(llama.path, watchdog_timeout=3, **llama.settings())
    read = engine._engine._runner.read

    def hanging(step):
        go_on.wait(PATIENCE_S)
        return read(step)

    async def scenario():
        assert len((await engine.generate([5, 6], GREEDY)).outputs) == 1
        monkeypatch.setattr(engine._engine._runner, "read", hanging)
        waiting = [asyncio.create_task(engine.generate([5, 6], GREEDY)) for _ in range(3)]
        while not engine.stalled:
            await asyncio.sleep(0.01)
        late = asyncio.create_task(engine.generate([5, 6], GREEDY))
        for task in (*waiting, late):
            with pytest.raises(EngineClosedError, match=r"a step has not ended within 3 s"):
                await task
        with pytest.raises(EngineClosedError, match="the engine is closed"):
            await engine.generate([5, 6], GREEDY)

    try:
        run(scenario())
        assert isinstance(engine.failure, StepTimeoutError)
        engine.close()
        assert engine.stuck
    finally:
        go_on.set()
        engine._thread._thread.join(PATIENCE_S)
    assert not engine.stuck, "a step that ends after all frees the device"
