"""Programs of one device, where there are several, come back from the cache."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from unittest import mock

import on_demand
import pytest
from scripts import on_eight_devices
from tiny_engines import TinyModel, generate

from jaxserve.core.requests.sampling_params import SamplingParams

pytestmark = pytest.mark.meshes


@on_eight_devices
def test_an_engine_of_one_device_of_eight_starts_warm():
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    settings = {"page_size": 8, "max_num_seqs": 1, "max_num_batched_tokens": 1 + 16}
    with (
        tempfile.TemporaryDirectory() as directory,
        mock.patch.dict(os.environ, JAXSERVE_CACHE=f"{directory}/cache"),
        on_demand.suspended(),
    ):
        model = TinyModel.write_llama(Path(directory))
        for compiles in (True, False):
            with model.load(**settings) as llm:
                compiled = llm.get_metrics()["jaxserve:programs_compiled_total"].value
                assert (compiled > 0) == compiles
                model.check_greedy(generate(llm, model.prompts[7], params))
