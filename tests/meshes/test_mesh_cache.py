"""Programs of one device, where there are several, come back from the cache."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import on_demand
import pytest
from scripts import on_eight_devices
from tiny_engines import TinyModel, generate

from jaxserve.core.requests.sampling_params import SamplingParams

pytestmark = pytest.mark.meshes


@on_eight_devices
def test_an_engine_of_one_device_of_eight_starts_warm():
    starts_warm(lambda model: {}, prompt_tokens=20)


@on_eight_devices
def test_pages_on_the_host_are_attended_to_on_the_hosts_device():
    """Whose programs come back for that device: queries go there from another one, and back."""

    def settings(model: TinyModel) -> dict[str, Any]:
        pages = {"kv_cache_memory_bytes": 6 * 8 * model.token_bytes, "max_model_len": 96}
        return pages | {"kv_on": "host", "devices": [3]}

    starts_warm(settings, prompt_tokens=80, sends_queries=True)


def starts_warm(
    more: Callable[[TinyModel], dict[str, Any]], prompt_tokens: int, *, sends_queries: bool = False
) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    settings = {"page_size": 8, "max_num_seqs": 1, "max_num_batched_tokens": 1 + 16}
    prompt = np.random.RandomState(3).randint(3, 250, prompt_tokens).tolist()
    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch.dict(os.environ, JAXSERVE_CACHE=f"{directory}/cache"),
        on_demand.suspended(),
    ):
        model = TinyModel.write_llama(Path(directory))
        for compiles in (True, False):
            with model.load(**settings, **more(model)) as llm:
                metrics = llm.get_metrics()
                assert (metrics["jaxserve:programs_compiled_total"].value > 0) == compiles
                model.check_greedy(generate(llm, prompt, params))
                if sends_queries:
                    assert llm.engine.counters.host_kv_copies.query_bytes > 0
                    (pages, *_) = llm.engine._runner._kinds.forward.store.on_host(0)
                    assert pages.devices() == {jax.devices()[0]} != set(llm.plan().shapes.devices)
