"""A server that writes down its requests and closes, and the next one that takes them up."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from patience import PATIENCE_S
from tiny_engines import LONGEST, assert_idle

from jaxserve.async_engine import AsyncEngine
from jaxserve.core.errors import EngineClosedError, RequestError, SnapshotError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.requests.structured_outputs import StructuredOutputs
from jaxserve.engine.output_queue import output_of

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

    asyncio.run(asyncio.wait_for(stopped(), timeout=PATIENCE_S))
    asyncio.run(asyncio.wait_for(started(), timeout=PATIENCE_S))


def test_a_request_goes_from_engine_to_engine(llama):
    """With a grammar, which the importing engine compiles outside its thread."""

    async def moved():
        engines = [
            AsyncEngine.load(llama.path, **llama.settings(page_size=page_size))
            for page_size in (4, 8)
        ]
        source, target = engines
        try:
            stream = source.stream(llama.prompts[5], GREEDY, "moved")
            begun = await anext(stream)
            with pytest.raises(RequestError, match="'other' is not an unfinished request"):
                await source.export_request("other")
            parts = await source.export_request("moved")
            async with await target.import_request(parts) as updates:
                output = await output_of(updates)
            assert list(output.outputs[0].token_ids) == llama.answers[5]
            rest = [token async for delta in stream for token in delta.token_ids]
            assert [*begun.token_ids, *rest] == llama.answers[5]

            regex = StructuredOutputs(regex="[a-f]{8,20}!")
            params = dataclasses.replace(GREEDY, ignore_eos=False, structured_outputs=regex)
            task = asyncio.create_task(source.generate(llama.prompts[6], params, "regular"))
            while "regular" not in source._engine._requests:
                await asyncio.sleep(0)
            parts = await source.export_request("regular")
            async with await target.import_request(parts) as updates:
                assert (await output_of(updates)).outputs[0].text == (await task).outputs[0].text
            with pytest.raises(SnapshotError, match="is damaged"):
                await target.import_request([part[:-1] for part in parts])
        finally:
            for engine in engines:
                await asyncio.to_thread(engine.close)

    asyncio.run(asyncio.wait_for(moved(), timeout=PATIENCE_S))
