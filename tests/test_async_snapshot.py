"""A server that writes down its requests and closes, and the next one that takes them up."""

from __future__ import annotations

import asyncio

import pytest
from tiny_engines import LONGEST, assert_idle

from jaxserve.async_engine import AsyncEngine
from jaxserve.core.errors import EngineClosedError, SnapshotError
from jaxserve.core.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=LONGEST, ignore_eos=True)


def test_a_server_takes_up_what_another_left(llama, tmp_path):
    async def stopped():
        engine = AsyncEngine.load(llama.path, **llama.settings())
        streams = [engine.stream(prompt, GREEDY) for prompt in llama.prompts]
        await asyncio.gather(*(anext(stream) for stream in streams[:4]))
        others = [asyncio.create_task(anext(stream)) for stream in streams[4:]]
        await asyncio.sleep(0)
        await engine.snapshot(tmp_path)
        await asyncio.to_thread(engine.close)
        await asyncio.gather(*others, return_exceptions=True)
        with pytest.raises(EngineClosedError):
            await engine.snapshot(tmp_path)

    async def started():
        engine = AsyncEngine.load(llama.path, **llama.settings())
        try:
            restored = await engine.restore(tmp_path)
            with pytest.raises(SnapshotError, match="async-0"):
                await engine.restore(tmp_path)
            cancelled, *kept = (request.output for request in restored.values())
            cancelled.cancel()
            new = await engine.generate(llama.prompts[2], GREEDY)
            assert new.request_id not in restored
            assert list(new.outputs[0].token_ids) == llama.answers[2]
            for output in await asyncio.gather(*kept):
                index = llama.prompts.index(list(output.prompt_token_ids))
                assert list(output.outputs[0].token_ids) == llama.answers[index]
            assert kept
        finally:
            await asyncio.to_thread(engine.close)
        assert_idle(engine._engine)

    asyncio.run(asyncio.wait_for(stopped(), timeout=300))
    asyncio.run(asyncio.wait_for(started(), timeout=300))
