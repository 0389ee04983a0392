"""Engines on devices of their own, out of more that a process has."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import tempfile
from pathlib import Path

import jax
import pytest
from exhaustive import exhaustive
from mesh_engines import load, on_mesh
from tiny_engines import Arrival, TinyModel, drive

from jaxserve.async_engine import AsyncEngine
from jaxserve.core.errors import ConfigError
from jaxserve.core.events import Dispatched
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.engine.output_queue import output_of
from jaxserve.llm import LLM
from jaxserve.runtime.hardware.devices import engine_devices

pytestmark = pytest.mark.meshes
EIGHT = "TP8"
"""The devices of the process, of which no engine here takes all."""


def places(arrays: list[jax.Array]) -> set[int]:
    return {device.id for array in arrays for device in array.sharding.device_set}


@exhaustive
def test_engines_side_by_side_keep_to_their_devices():
    on_mesh(EIGHT, check_side_by_side)


def check_side_by_side(_: str) -> None:
    """Each has its arrays on its devices alone. They step in turn; the tokens are the oracle's."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        model = TinyModel.write_llama(Path(directory))
        engines: dict[tuple[int, ...], LLM] = {}
        for mesh, devices in (("TP2", None), ("TP2", [5, 4]), ("", [4])):
            before = {id(array) for array in jax.live_arrays()}
            llm = load(model, mesh, devices=devices, host_pages=8, debug_kv=True)
            stack.callback(llm.close)
            named = tuple(devices or (0, 1))
            assert [device.id for device in llm.plan().shapes.devices] == list(named)
            new = [array for array in jax.live_arrays() if id(array) not in before]
            assert places(new) == set(named)
            engines[named] = llm
        greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        requests = [
            (llm.engine, index, llm.engine.add(f"{index}", model.prompts[index], greedy))
            for llm in engines.values()
            for index in (5, 7, 9)
        ]
        for llm in itertools.cycle(engines.values()):
            if not any(llm.engine.has_work for llm in engines.values()):
                break
            if llm.engine.has_work:
                llm.engine.step()
        for engine, index, request in requests:
            (completion,) = engine.output(request).outputs
            assert list(completion.token_ids) == model.answer(index, 12, ignore_eos=True)


def test_engines_at_once_hand_requests_to_each_other():
    on_mesh(EIGHT, check_at_once)


def check_at_once(_: str) -> None:
    """Three engines serve in threads of their own, and a request goes from one device to two, and
    on to two others with larger pages."""
    with tempfile.TemporaryDirectory() as directory:
        model = TinyModel.write_llama(Path(directory))
        engines = [
            AsyncEngine(
                load(model, mesh, devices=devices, page_size=size, trace_file="unused").engine
            )
            for mesh, devices, size in (("", [0], 4), ("TP2", [1, 2], 8), ("TP2", [3, 4], 16))
        ]
        try:
            asyncio.run(serve_at_once(model, engines))
        finally:
            for engine in engines:
                engine.close()


async def serve_at_once(model: TinyModel, engines: list[AsyncEngine]) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)

    async def generated(engine: AsyncEngine, index: int) -> list[int]:
        output = await engine.generate(model.prompts[index], greedy)
        return list(output.outputs[0].token_ids)

    indices = (5, 7, 9, 11)
    for engine in engines:  # Programs are compiled on demand, for longer than all that follows.
        await asyncio.gather(*(generated(engine, index) for index in indices))
    begun_us = max(engine._engine.log.now() for engine in engines)
    outputs = await asyncio.gather(
        *(generated(engine, index) for engine in engines for index in indices)
    )
    assert outputs == [model.answer(index, 24, ignore_eos=True) for index in indices] * 3
    steps = [
        [
            record.time_us
            for record in engine._engine.log.records
            if isinstance(record, Dispatched) and record.time_us >= begun_us
        ]
        for engine in engines
    ]
    last_first = max(times[0] for times in steps)
    assert last_first < min(times[-1] for times in steps), "one waited for another"

    first, second, third = engines
    longer = dataclasses.replace(greedy, max_tokens=90)  # It must still run when it is exported.
    stream = first.stream(model.prompts[9], longer, "moved")
    begun = await anext(stream)
    there = await second.import_request(await first.export_request("moved"))
    await stream.aclose()
    parts = await second.export_request("moved")
    await second.abort("moved")
    back = await third.import_request(parts)
    output = await output_of(back)
    tokens = list(output.outputs[0].token_ids)
    assert tokens[: len(begun.token_ids)] == list(begun.token_ids) and len(tokens) == 90
    model.check_greedy(output)
    assert (await output_of(there)).outputs[0].finish_reason == "abort"


def test_pages_swap_on_a_device_that_is_not_the_first():
    on_mesh(EIGHT, check_swaps)


def check_swaps(_: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with tempfile.TemporaryDirectory() as directory:
        model = TinyModel.write_llama(Path(directory))
        settings = {"pages": 15, "host_pages": 64, "preemption": "swap", "debug_kv": True}
        before = {id(array) for array in jax.live_arrays()}
        with load(model, "", devices=[6], **settings) as llm:
            assert places([a for a in jax.live_arrays() if id(a) not in before]) == {6}
            arrivals = [Arrival(model.prompts[index], params) for index in (9, 10)]
            for output in drive(llm.engine, arrivals):
                model.check_greedy(output)
            assert llm.engine.kv.counters.swaps > 0


def test_devices_that_cannot_be_are_refused_by_name():
    on_mesh(EIGHT, check_refusals)


def check_refusals(_: str) -> None:
    def refusal(**settings) -> str:
        with pytest.raises(ConfigError) as error:
            engine_devices(EngineConfig(**settings))
        return str(error.value)

    unknown = refusal(devices=[0, 9, 11], tensor_parallel_size=3)
    assert "no device 9, 11" in unknown
    assert "there are 0, 1, 2, 3, 4, 5, 6, 7 (cpu)" in unknown
    few = refusal(tensor_parallel_size=3, context_parallel_size=3)
    assert "take 9 devices, but there are only 8" in few
    assert "1 entries" in refusal(devices=[0], tensor_parallel_size=2)
    assert [device.id for device in engine_devices(EngineConfig(devices=[7]))] == [7]
