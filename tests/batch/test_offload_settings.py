"""The settings that carry out a policy of offloading, and those that it refuses."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engines import TinyModel

from jaxserve.cli.arguments.options import EngineOptions
from jaxserve.cli.batch import Batch
from jaxserve.cli.planning.batch_offload import carried_out, choose, fastest
from jaxserve.core.errors import ConfigError
from jaxserve.core.settings.config import EngineConfig
from jaxserve.offline.offload_policy import (
    Lengths,
    MemoryCapacity,
    ModelBytes,
    OffloadPolicy,
    PolicyRates,
    Problem,
)
from jaxserve.runtime.startup import engine_plan

LAYERS = 7
RATES = PolicyRates(
    {rows: 1e-3 + rows * 1e-4 for rows in (1, 2, 4)}, 1e-7, 1e-4, 1e6, 1e6, 1e7, 1e7, 0.5
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return TinyModel.write_llama(tmp_path_factory.mktemp("seven"), num_hidden_layers=LAYERS)


@settings(deadline=None, max_examples=25)
@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 4), st.integers(1, 4))
def test_no_more_is_held_than_the_policy_says(model, layers, kv, rows, steps):
    """Whole layers and whole tokens, rounded down; and the modelled time is that of the rounded
    shares, so it is never less."""
    options = EngineOptions(**model.settings(model=model.path, max_num_seqs=None))
    placement = engine_plan.decide(
        dataclasses.replace(options, weights_on="disk", max_num_seqs=4)
    ).shapes.placement
    one = Problem(
        ModelBytes(LAYERS, max(placement.layer_bytes), placement.outside_bytes, 512, 256),
        RATES,
        Lengths(64, 32),
        MemoryCapacity(1e9, 1e9, 1e9),
    )
    shares = {
        (kind, tier): 0.0
        for kind in ("weights", "kv", "activations")
        for tier in ("device", "host", "disk")
    }
    shares |= {("weights", "device"): layers, ("weights", "disk"): 1 - layers}
    shares |= {("kv", "device"): kv, ("kv", "host"): 1 - kv, ("activations", "device"): 1.0}
    policy = OffloadPolicy(rows, steps, shares, one.seconds(rows, steps, shares))
    chosen = carried_out(options, one, policy)
    decided = engine_plan.decide(EngineConfig(**dataclasses.asdict(chosen.engine)))
    held = decided.shapes.placement.device_bytes
    assert held <= placement.outside_bytes + (2 + layers * LAYERS) * one.model.layer
    assert len(decided.shapes.placement.streamed) in (0, LAYERS - int(layers * LAYERS + 1e-6))
    config = decided.config
    assert (config.weights_on == "disk") == (int(layers * LAYERS + 1e-6) + 2 < LAYERS)
    assert config.steps_per_weight_read == (steps if config.weights_on == "disk" else 1)
    assert config.max_num_seqs == rows * steps
    assert (config.kv_on == "host") == (kv < 1 - 1e-6)
    if config.kv_on == "host":
        assert config.resident_kv_tokens <= max(1, 96 * kv)
    if config.weights_on == "disk":
        assert chosen.policy.token_s >= policy.token_s * (1 - 1e-9)


def test_the_settings_fit_where_the_policy_alone_would_not(model):
    """Which here knows nothing of the memory for programs and state."""
    options = EngineOptions(**model.settings(model=model.path, max_num_seqs=None))
    probe = dataclasses.replace(options, weights_on="disk", max_num_seqs=4)
    planned = engine_plan.decide(dataclasses.replace(probe, memory_utilization=1.0))
    placement, memory = planned.shapes.placement, planned.memory
    layer = max(placement.layer_bytes)
    device = memory.limit_bytes - memory.room_bytes + memory.page_bytes * 8 + 3 * layer
    options = dataclasses.replace(options, memory_utilization=device / memory.limit_bytes)
    problem = Problem(
        ModelBytes(LAYERS, layer, placement.outside_bytes, 512, 256),
        RATES,
        Lengths(64, 32),
        MemoryCapacity(device, 0, 1e12),
    )
    sizes = [1, 2, 4]
    first = carried_out(options, problem, problem.best(sizes, [1, 2, 4, 8, 16], ()))
    assert not engine_plan.decide(first.engine).memory.fits
    chosen = fastest(options, problem)
    assert engine_plan.decide(chosen.engine).memory.fits
    assert chosen.engine.weights_on == "disk"
    assert chosen.policy.token_s >= first.policy.token_s


@pytest.mark.parametrize(
    ("given", "in_blocks"),
    [
        ({}, True),
        ({"scheduler": "medha"}, False),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": "auto"}}, False),
    ],
)
def test_a_block_has_one_step_where_the_time_of_each_counts(model, given, in_blocks):
    own = model.settings(model=model.path, max_num_seqs=None)
    options = EngineOptions(**own | {"max_num_batched_tokens": None}, **given)
    probe = dataclasses.replace(options, max_num_seqs=4, weights_on="disk")
    placement = engine_plan.decide(probe).shapes.placement
    layer, outside = max(placement.layer_bytes), placement.outside_bytes
    problem = Problem(
        ModelBytes(LAYERS, layer, outside, 1, 1),
        RATES,
        Lengths(64, 32),
        MemoryCapacity(outside + 4 * layer, 0, 1e12),
    )
    chosen = fastest(options, problem).engine
    assert chosen.weights_on == "disk"
    assert (chosen.steps_per_weight_read > 1) == in_blocks


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"weights_on": "disk"}, "weights_on"),
        ({"weights_on": "disk", "steps_per_weight_read": 2}, "weights_on"),
        ({"kv_on": "host"}, "kv_on"),
    ],
)
def test_what_the_policy_decides_is_not_given_as_well(given, name):
    with pytest.raises(ConfigError, match=f"which decides {name}, but"):
        choose(EngineOptions(**given), None, (), None)


def test_several_devices_are_refused(tmp_path):
    options = EngineOptions(tensor_parallel_size=2)
    job = Batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl", offload="auto", engine=options)
    with pytest.raises(ConfigError, match="offload is 'auto', which is for one device"):
        job.run()
