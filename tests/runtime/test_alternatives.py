"""What a refusal offers instead is accepted, and no more could have been offered."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from exhaustive import exhaustive
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from test_memory_tiers import Accelerator
from tiny_checkpoints import CONFIG

from jaxserve.core.errors import ConfigError, MemoryPlanError
from jaxserve.core.settings.config import EngineConfig
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.runtime.hardware import device_memory
from jaxserve.runtime.hardware.devices import described_mesh
from jaxserve.runtime.planning.alternatives import alternatives, devices_needed
from jaxserve.runtime.planning.memory import MemoryPlan
from jaxserve.runtime.startup import engine_plan

GIB = 1 << 30
LLAMA_8B = CONFIG | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


def config_of(raw: dict, directory: Path, **changes) -> EngineConfig:
    path = directory / "config.json"
    path.write_text(json.dumps(raw))
    return EngineConfig(model=path, load_format="dummy", **changes)


def refusal(config: EngineConfig) -> MemoryPlanError:
    with pytest.raises(MemoryPlanError) as error:
        engine_plan.plan_engine(config)
    return error.value


def assert_as_offered(config: EngineConfig, refused: MemoryPlanError) -> None:
    """Every alternative is accepted, and named; a page more than it offers is not."""
    for changes in refused.alternatives:
        assert engine_plan.plan_engine(dataclasses.replace(config, **changes)).memory.fits
        for name, value in changes.items():
            assert f"{name} {value}" in str(refused)
        if "max_model_len" in changes:
            page_size = engine_plan.decide(config).memory.page_size
            more = changes | {"max_model_len": changes["max_model_len"] + page_size}
            with pytest.raises((MemoryPlanError, ConfigError)):
                engine_plan.plan_engine(dataclasses.replace(config, **more))


def test_a_large_model_on_a_small_host(tmp_path, monkeypatch):
    monkeypatch.setattr(device_memory, "host_memory", lambda: 24 * GIB)
    config = config_of(LLAMA_8B, tmp_path)
    refused = refusal(config)
    kinds = {changes.get("quantization") for changes in refused.alternatives}
    assert {"int8", "fp8", "int4"} <= kinds
    assert {"dtype": "bfloat16"}.items() <= refused.alternatives[3].items()
    assert all(changes["max_model_len"] < 131_072 for changes in refused.alternatives)
    assert_as_offered(config, refused)


def test_a_model_that_nothing_makes_fit_is_told_its_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(device_memory, "host_memory", lambda: 24 * GIB)
    refused = refusal(config_of(LLAMA_70B, tmp_path))
    assert refused.alternatives == []
    weights = engine_plan.decide(config_of(LLAMA_70B, tmp_path, quantization="int4")).memory
    assert f"int4 {weights.weights_bytes / GIB:.2f} GiB" in str(refused)


def test_a_share_of_the_memory_that_is_too_small(tmp_path, monkeypatch):
    monkeypatch.setattr(device_memory, "host_memory", lambda: 24 * GIB)
    config = config_of(LLAMA_8B, tmp_path, max_model_len=512, memory_utilization=0.05)
    config = dataclasses.replace(config, dtype="bfloat16")
    refused = refusal(config)
    assert [set(changes) for changes in refused.alternatives] == [{"memory_utilization"}]
    assert_as_offered(config, refused)


def on_accelerators(config: EngineConfig, num_bytes: int):
    """A resolved config, and its plan with changes on as many devices of so much memory."""
    device, checkpoint = Accelerator(num_bytes), open_checkpoint(config.model, "dummy")
    config = config.resolve(checkpoint.config, device.platform)

    def plan_of(changes: dict) -> MemoryPlan | None:
        try:
            changed = dataclasses.replace(config, **changes)
            mesh = described_mesh(changed)
            return engine_plan.decide_on(device, mesh, changed, checkpoint).memory
        except (ConfigError, MemoryPlanError):
            return None

    return config, plan_of


@exhaustive
def test_more_devices_are_offered_where_there_are_any(tmp_path):
    config, plan_of = on_accelerators(config_of(LLAMA_70B, tmp_path), 80 * GIB)
    assert not plan_of({}).fits
    sizes = {}
    for available in (1, 2, 8):
        found = alternatives(config, plan_of, available)
        (sizes[available],) = [c for c in found if "tensor_parallel_size" in c] or [{}]
        for changes in found:
            assert plan_of(changes).fits
    assert sizes[1] == {}
    # 132 GiB of weights: on two devices not the whole context, on four all of it.
    assert sizes[2]["tensor_parallel_size"] == 2
    assert sizes[2]["max_model_len"] < 131_072
    assert sizes[8] == {"tensor_parallel_size": 4}
    assert devices_needed(config, plan_of) == 4
    named, plan_of_named = on_accelerators(config_of(LLAMA_70B, tmp_path, devices=[5]), 80 * GIB)
    found = alternatives(named, plan_of_named, 8)
    assert found and all("tensor_parallel_size" not in changes for changes in found)
    assert devices_needed(named, plan_of_named) == 4


def test_quantized_kv_is_offered_for_a_longer_context(tmp_path):
    """Of 132 bytes a head instead of 256, in the pool and in transfer buffers."""
    config, plan_of = on_accelerators(config_of(LLAMA_8B, tmp_path), 24 * GIB)
    shorter, *others = alternatives(config, plan_of, 1)
    (quantized,) = [changes for changes in others if "kv_cache_dtype" in changes]
    assert quantized["kv_cache_dtype"] == "int8"
    assert 256 / 132 < quantized["max_model_len"] / shorter["max_model_len"] < 2.1


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    free=st.integers(1 << 16, 1 << 23),
    share=st.floats(0.01, 1),
    max_num_seqs=st.integers(1, 8),
    length=st.integers(2, 2048),
    pool=st.one_of(st.none(), st.integers(1, 1 << 22)),
    quantization=st.sampled_from([None, "int8", "int4"]),
    page_size=st.sampled_from([1, 3, 64]),
)
@example(  # a page table of a shorter context leaves room for one page more
    free=283_096,
    share=1.0,
    max_num_seqs=2,
    length=35,
    pool=None,
    quantization=None,
    page_size=1,
)
def test_whatever_is_offered_is_accepted(
    tmp_path, monkeypatch, free, share, max_num_seqs, length, pool, quantization, page_size
):
    monkeypatch.setattr(device_memory, "host_memory", lambda: free)
    config = config_of(
        CONFIG | {"max_position_embeddings": 2048},
        tmp_path,
        memory_utilization=share,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + 16,
        max_model_len=length,
        kv_cache_memory_bytes=pool,
        quantization=quantization,
        page_size=page_size,
    )
    try:
        engine_plan.plan_engine(config)
    except MemoryPlanError as refused:
        assert_as_offered(config, refused)
