"""What a `config.json` may say of a mixture of experts, and the sizes of known models."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest
from published_configs import GPT_OSS_120B, QWEN3_235B_A22B
from published_families import PUBLISHED

from jaxserve.core.errors import ConfigError, ModelError, UnsupportedModelError
from jaxserve.core.settings.config import EngineConfig
from jaxserve.models.moe_specs import active_parameters
from jaxserve.models.partition import partition
from jaxserve.models.registry import get_family, param_specs
from jaxserve.runtime.programs.forward.step_work import step_work
from jaxserve.runtime.startup import engine_plan

MODELS_PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MIXTRAL_8X7B = PUBLISHED["Mixtral-8x7B"]
QWEN2_MOE = QWEN3_235B_A22B | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "num_hidden_layers": 4,
    "shared_expert_intermediate_size": 64,
}


def config_of(raw, **fields):
    return get_family(raw["architectures"][0]).config_from_hf(raw | fields)


@pytest.mark.parametrize(
    "raw, parameters, active, kv_bytes_per_token, groups",
    [
        (MIXTRAL_8X7B, 46_702_792_704, 12_879_925_248, 131_072, 1),
        (QWEN3_235B_A22B, 235_093_634_560, 22_190_763_520, 192_512, 1),
        (GPT_OSS_120B | {"quantization_config": None}, 116_829_156_672, 5_711_982_912, 73_728, 2),
    ],
)
def test_known_models_to_the_byte(tmp_path, raw, parameters, active, kv_bytes_per_token, groups):
    """Planned from the config alone: published numbers of parameters, and their bytes. A page has
    the layers of one KV group."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    settings = {"model": path, "load_format": "dummy", "dtype": "bfloat16", "page_size": 64}
    decided = engine_plan.decide(EngineConfig(**settings))
    model, specs = decided.shapes.model, decided.shapes.specs
    assert sum(spec.size for spec in jax.tree.leaves(specs)) == parameters
    assert active_parameters(model, specs) == active
    assert decided.memory.weights_bytes == 2 * parameters
    assert decided.memory.page_bytes == 64 * kv_bytes_per_token // groups
    work, embedding = step_work(decided.shapes), model.vocab_size * model.hidden_size
    outside = 2 * embedding + model.hidden_size  # the last norm
    assert work.weights_per_token == active - outside
    assert work.layer_bytes + work.expert_bytes == 2 * (parameters - outside)


def test_gpt_oss_120b_in_mxfp4(tmp_path):
    """Its experts in a byte a weight and two a group of 32, planned from the config alone."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT_OSS_120B))
    settings = {"model": path, "load_format": "dummy", "dtype": "bfloat16"}
    decided = engine_plan.decide(EngineConfig(**settings))
    assert decided.config.quantization == "mxfp4"
    assert decided.weights_dequantized == (0, 36 * 128 * 3)
    experts = 36 * 128 * 3 * 2880 * 2880
    others = 116_829_156_672 - experts
    weights = decided.memory.weights_bytes
    assert weights == experts + 2 * experts // 32 + 2 * others
    assert f"takes {weights / 2**30:.1f} GiB of weights" in MODELS_PAGE.read_text("utf-8")
    plain = tmp_path / "plain" / "config.json"
    plain.parent.mkdir()
    plain.write_text(json.dumps(GPT_OSS_120B | {"quantization_config": None}))
    settings["model"] = plain
    with pytest.raises(ConfigError, match="'mxfp4', but the model has no weights in blocks of MXF"):
        engine_plan.decide(EngineConfig(**settings, quantization="mxfp4"))


@pytest.mark.parametrize(
    "fields, sparse",
    [
        ({}, [0, 1, 2, 3]),
        ({"decoder_sparse_step": 2}, [1, 3]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [1]),
        ({"mlp_only_layers": None}, [0, 1, 2, 3]),
    ],
)
def test_which_layers_have_experts(fields, sparse):
    config = config_of(QWEN2_MOE, **fields)
    assert [layer for layer, kind in enumerate(config.layer_kinds) if kind.sparse] == sparse
    for kind, layer in zip(config.layer_kinds, param_specs(config)["layers"], strict=True):
        assert ("router" in layer, "gate_up" in layer) == (kind.sparse, not kind.sparse)


def test_windows_of_qwen_moe():
    """Of Qwen2-MoE every other layer up to max_window_layers, of Qwen3-MoE all."""
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 3}
    assert config_of(QWEN2_MOE, **window).sliding_windows == (9, None, 9, None)
    small = window | {"num_hidden_layers": 4}
    assert config_of(QWEN3_235B_A22B, **small).sliding_windows == (9,) * 4
    assert config_of(QWEN2_MOE, sliding_window=9).sliding_windows == (None,) * 4


@pytest.mark.parametrize(
    "fields, error, message",
    [
        ({"n_group": 8}, UnsupportedModelError, "n_group 8 is not implemented for Qwen2Moe"),
        ({"scoring_func": "sigmoid"}, UnsupportedModelError, "scoring_func .sigmoid. is not"),
        ({"routed_scaling_factor": 2.5}, UnsupportedModelError, "routed_scaling_factor 2.5"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act .gelu. is not implemented"),
        (
            {"num_experts_per_tok": 129},
            ModelError,
            "129; it must be at most the number of experts, 128",
        ),
        ({"num_experts": 4096, "num_hidden_layers": 94}, ModelError, "at most 697 in 94 layers"),
        ({"num_local_experts": 9}, ModelError, "num_local_experts 9; it must be num_experts 128"),
        ({"num_experts": 0}, ModelError, "num_experts 0; it must be an integer of at least 1"),
        ({"norm_topk_prob": 1}, ModelError, "norm_topk_prob 1; it must be true or false"),
        ({"mlp_only_layers": "all"}, ModelError, "mlp_only_layers .all.; it must be a list"),
        ({"decoder_sparse_step": 0}, ModelError, "decoder_sparse_step 0; it must be"),
    ],
)
def test_what_is_not_implemented_is_refused(fields, error, message):
    with pytest.raises(error, match=message):
        config_of(QWEN2_MOE, **fields)


def test_ranks_must_divide_whole_experts():
    config = config_of(QWEN2_MOE, num_experts=6, num_experts_per_tok=2)
    split = {"tensor": 4, "stages": 1, "vocab": 4}
    with pytest.raises(ConfigError, match=r"splits 6 experts over 4 devices, .* 1, 2, 3, 6"):
        partition(config, param_specs(config), expert_ranks=4, **split)
    partition(config, param_specs(config), **split)
