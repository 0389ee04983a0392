"""Settings: what is refused before anything is opened."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM, AsyncEngine
from jaxserve.core.errors import ConfigError
from jaxserve.core.model_config import ModelConfig, RopeConfig
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.settings.engine_settings import EngineSettings
from jaxserve.core.settings.speculative import SpeculativeConfig

HALVES = {"dual_batch_overlap": "on", "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int3"}, "dtype is 'int3'.*float32, bfloat16, float16"),
        ({"scheduler": ["x"]}, r"scheduler is \['x'\].*sarathi"),
        ({"program_scope": "foo"}, "program_scope is 'foo'.*step, layer"),
        ({"load_format": "pickle"}, "load_format is 'pickle'"),
        ({"quantization": "nf4"}, "quantization is 'nf4'"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0.*1 or more"),
        ({"max_num_seqs": True}, "max_num_seqs is True"),
        ({"memory_utilization": "a"}, r"memory_utilization is 'a'.*\(0, 1\]"),
        ({"memory_utilization": 0}, "memory_utilization is 0"),
        ({"seed": None}, "seed is None"),
        ({"model": ""}, "model is "),
        ({"preemption": "never"}, "preemption is 'never'.*auto, swap, recompute"),
        ({"preemption": None}, "preemption is None"),
        ({"host_kv_bytes": -1}, "host_kv_bytes is -1.*0 or more"),
        ({"host_kv_bytes": 1e9}, "host_kv_bytes is 1000000000.0.*integer"),
        ({"disk_kv_bytes": -5, "disk_kv_dir": "/tmp"}, "disk_kv_bytes is -5"),
        ({"disk_kv_bytes": 5}, "disk_kv_dir is None and disk_kv_bytes 5; give both"),
        ({"disk_kv_dir": "/tmp"}, "disk_kv_dir is '/tmp' and disk_kv_bytes 0; give both"),
        ({"disk_kv_bytes": None, "disk_kv_dir": "/tmp"}, "disk_kv_bytes"),
        ({"disk_kv_bytes": 5, "disk_kv_dir": 7}, "disk_kv_dir is 7"),
        ({"target_step_us": 5}, "target_step_us is 5, but scheduler is 'sarathi'.*medha"),
        ({"target_step_us": 0, "scheduler": "medha"}, "target_step_us is 0.*1 or more"),
        ({"fair_share": "yes"}, "fair_share is 'yes'"),
        ({"priority_ageing_s": 0}, "priority_ageing_s is 0; it must be a number of seconds"),
        ({"priority_ageing_s": float("nan")}, "priority_ageing_s is nan"),
        ({"priority_ageing_s": "30"}, "priority_ageing_s is '30'"),
        ({"enable_prefix_caching": None}, "enable_prefix_caching is None"),
        ({"debug_kv": 1}, "debug_kv is 1"),
        ({"dual_batch_overlap": True}, "dual_batch_overlap is True.*auto, on, off"),
        ({"dual_batch_overlap": "on"}, "tensor_parallel_size is 1.*leave dual_batch_overlap out"),
        (HALVES | {"context_parallel_size": 2}, "'on', but context_parallel_size is 2"),
        (HALVES | {"sequence_parallel": True}, "'on', but sequence_parallel is True"),
        (HALVES | {"batch_invariant": True}, "'on', but batch_invariant is True"),
        ({"devices": "0,2"}, "devices is '0,2'.*list of device ids"),
        ({"devices": [True]}, r"devices is \[True\].*integers"),
        ({"devices": [-1]}, r"devices is \[-1\].*integers"),
        ({"devices": []}, r"devices is \[\], which has 0 entries.*need 1"),
        ({"devices": [1, 2, 1], "tensor_parallel_size": 3}, "lists 1 twice"),
        ({"devices": [2, 3, 4], "tensor_parallel_size": 2}, r"tensor_parallel_size 2 x .* need 2"),
        ({"devices": [0, 1, 2], "tensor_parallel_size": 2}, r"\[0, 1, 2\], which has 3 entries"),
        (
            {"data_parallel_size": 2},
            "data_parallel_size is a setting of vLLM.*option of jaxserve serve and batch",
        ),
        ({"gpu_memory_utilization": 0.9}, "of vLLM.*use memory_utilization"),
        ({"max_nm_seqs": 3}, "unknown setting 'max_nm_seqs'; did you mean max_num_seqs?"),
        ({"zzz": 3}, "unknown setting 'zzz'.*max_num_seqs"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_value(settings, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.of(**settings)


def test_type_checkers_know_every_setting():
    """Keyword arguments of `LLM` and `AsyncEngine.load`; some take more types than the config."""
    known = typing.get_type_hints(EngineConfig)
    del known["model"]
    wider = {
        "devices": list[int] | tuple[int, ...] | None,
        "disk_kv_dir": str | Path | None,
        "logits_processors": Sequence[str | Callable[..., Any]],
        "speculative_config": SpeculativeConfig | Mapping[str, Any] | None,
    }
    assert typing.get_type_hints(EngineSettings) == known | wider
    assert not EngineSettings.__required_keys__
    for function in (LLM.__init__, AsyncEngine.load):
        assert typing.get_type_hints(function)["settings"] == typing.Unpack[EngineSettings]


def model(kind: str) -> ModelConfig:
    return ModelConfig("LlamaForCausalLM", 64, 32, 64, 1, 2, 2, 16, 128, RopeConfig(kind=kind))


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_a_context_beyond_the_models_is_refused(kind):
    with pytest.raises(ConfigError, match=r"max_model_len is 256.*at most 128"):
        EngineConfig(max_model_len=256).resolve(model(kind), "cpu")


@pytest.mark.parametrize("drafts", [15, "auto"])
def test_more_drafts_than_the_context_has_tokens_are_refused(drafts):
    speculation = {"method": "ngram", "num_speculative_tokens": drafts}
    config = EngineConfig(max_model_len=7, speculative_config=speculation)
    with pytest.raises(ConfigError, match=r"num_speculative_tokens .* is 7; draft at most 6"):
        config.resolve(model("default"), "cpu")
    dataclasses.replace(config, max_model_len=16).resolve(model("default"), "cpu")


def test_other_names_of_dtypes():
    names = {"bf16": "bfloat16", "half": "float16", "fp32": "float32", "auto": None}
    assert {name: EngineConfig(dtype=name).dtype for name in names} == names


def test_dynamic_scaling_stretches_to_the_context_asked_for():
    assert EngineConfig(max_model_len=256).resolve(model("dynamic"), "cpu").max_model_len == 256


def test_what_is_not_said_is_decided():
    resolved = EngineConfig().resolve(model("default"), "cpu")
    undecided = [name for name, value in vars(resolved).items() if value is None]
    pools = ["kv_cache_memory_bytes", "host_kv_bytes", "disk_kv_dir"]
    chosen = ["devices", "quantization", "target_step_us", "priority_ageing_s"]
    chosen += ["max_loras", "max_lora_rank", "resident_weight_bytes"]
    chosen += ["shadow_rank", "shadow_budget", "shadow_outliers", "resident_kv_tokens"]
    chosen += ["sparf_components", "sparf_budget"]
    assert sorted(undecided) == sorted([*chosen, "speculative_config", *pools])
    assert EngineConfig().resolve(model("default"), "gpu").dtype == "bfloat16"
    assert EngineConfig(scheduler="medha").resolve(model("default"), "gpu").target_step_us == 50_000


def test_caching_is_on_and_all_else_of_the_kv_manager_off():
    config = EngineConfig()
    assert config.enable_prefix_caching
    assert (config.preemption, config.host_kv_bytes, config.disk_kv_bytes) == ("auto", None, 0)
    assert not config.fair_share and not config.debug_kv
