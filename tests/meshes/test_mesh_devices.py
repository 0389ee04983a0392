"""Engines on devices of their own, out of more that a process has."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from pathlib import Path

import jax
import pytest
from mesh_engines import load, on_mesh
from tiny_engines import Arrival, TinyModel, drive

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.llm import LLM
from jaxserve.runtime.devices import engine_devices

pytestmark = pytest.mark.meshes
EIGHT = "TP8"
"""The devices of the process, of which no engine here takes all."""


def places(arrays: list[jax.Array]) -> set[int]:
    return {device.id for array in arrays for device in array.sharding.device_set}


def test_engines_side_by_side_keep_to_their_devices():
    on_mesh(EIGHT, check_side_by_side)


def check_side_by_side(_: str) -> None:
    """Each has its arrays on its devices alone. They step in turn; the tokens are the oracle's."""
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        model = TinyModel.write_llama(Path(directory))
        engines: dict[tuple[int, ...], LLM] = {}
        for mesh, devices in (("TP2", None), ("TP2", [2, 3]), ("TP2", [5, 4]), ("", [3])):
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


def test_pages_swap_on_a_device_that_is_not_the_first():
    on_mesh(EIGHT, check_swaps)


def check_swaps(_: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with tempfile.TemporaryDirectory() as directory:
        model = TinyModel.write_llama(Path(directory))
        settings = {"pages": 15, "host_pages": 64, "preemption": "swap", "debug_kv": True}
        with load(model, "", devices=[6], **settings) as llm:
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
    assert [device.id for device in engine_devices(EngineConfig(devices=[7]))] == [7]
