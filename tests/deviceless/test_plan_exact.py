"""`jaxserve plan --exact`: all programs of an engine, compiled for a target device."""

from __future__ import annotations

import json

import pytest
from exhaustive import combination

pytest.importorskip("flax", reason="needs what jaxserve itself needs")

from jaxserve.core.devices import DeviceSpec
from jaxserve.core.errors import ConfigError
from jaxserve.core.settings.config import EngineConfig
from jaxserve.runtime.hardware.devices import DescribedDevice
from jaxserve.runtime.program_kinds import ProgramKinds
from jaxserve.runtime.startup import deviceless
from jaxserve.runtime.startup.engine_plan import EnginePlan, plan_described

pytestmark = pytest.mark.deviceless

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""SmolLM2's sizes but for the number of its layers."""
PLUGINS = {"v5e": "libtpu", "h200": "jax_plugins.xla_cuda13"}


def planned(tmp_path, name: str, **settings: object) -> tuple[DeviceSpec, EnginePlan]:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMOLLM2))
    settings = {"max_num_seqs": 1, "max_num_batched_tokens": 33} | settings
    spec = DeviceSpec.of(name)
    place = DescribedDevice(spec.platform, spec.kind, spec.memory_bytes)
    return spec, plan_described(EngineConfig(model=config, **settings), place)


@pytest.mark.parametrize(
    ("name", "tensor"), [combination("v5e", 1), combination("h200", 1), ("h200", 3)]
)
def test_every_program_is_compiled(tmp_path, name, tensor):
    """Of a single sequence too, whose logits are of one row."""
    pytest.importorskip(PLUGINS[name])
    spec, plan = planned(tmp_path, name, tensor_parallel_size=tensor)
    seen = []
    programs = deviceless.compile_programs_for(spec, plan, lambda *progress: seen.append(progress))
    assert set(programs) == {each.name for each in ProgramKinds(plan.shapes).specs()}
    assert seen[-1] == ("programs", len(programs), len(programs))
    exact = plan.with_programs(programs)
    assert exact.memory.scratch_bytes == programs.temp_bytes > 0
    assert exact.memory.num_pages == plan.memory.num_pages


def test_more_chips_than_a_host_has_are_refused():
    with pytest.raises(ConfigError, match="at most 8 chips on one host"):
        deviceless.compiler_devices(DeviceSpec.of("v5e"), 16)


def test_a_device_without_a_description_is_refused():
    with pytest.raises(ConfigError, match="no description of L4"):
        deviceless.compiler_devices(DeviceSpec.of("l4"), 1)
