"""What a DeepSeek's `config.json` may say, and what of its files is read."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from pathlib import Path

import family_members
import jax
import numpy as np
import pytest
from published_configs import DEEPSEEK_V3
from tiny_checkpoints import write_gguf, write_hf

from jaxserve.core.errors import ModelError, UnsupportedModelError, WeightsError
from jaxserve.core.model_config import ExpertGroups, MLAConfig
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.params import load_params
from jaxserve.models.registry import get_family, param_specs

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "families.json").read_text("utf-8"))
V3 = DEEPSEEK_V3 | {"quantization_config": None}
V2 = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "topk_method": "group_limited_greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "num_nextn_predict_layers": None,
}


def config_of(raw, **fields):
    raw = raw | fields
    return get_family(raw["architectures"][0]).config_from_hf(raw)


def test_published_fields():
    config = config_of(V3)
    assert config.mla == MLAConfig(1536, 512, 128, 64, 128)
    assert (config.num_kv_heads, config.head_dim, config.value_dim) == (1, 576, 512)
    assert config.rope.rotary_dim == 64 and config.num_mtp_layers == 1
    stretch = 0.1 * math.log(40) + 1
    assert config.attention_scale == pytest.approx(192**-0.5 * stretch**2, rel=1e-12)
    assert config.moe.groups == ExpertGroups(8, 4, best=2)
    assert config.moe.sparse_layers == (False,) * 3 + (True,) * 58
    assert config_of(V2).moe.groups == ExpertGroups(8, 4, best=1)
    assert config_of(V2, topk_method="greedy").moe.groups is None
    assert config_of(V3, n_group=1, topk_group=1).moe.groups is None
    assert config_of(V3, q_lora_rank=None).mla.q_rank is None


@pytest.mark.parametrize("raw", [V2, V3], ids=["V2", "V3"])
def test_what_is_left_out_is_what_its_class_has(raw):
    """transformers leaves such fields out of a saved config.json."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings")
    bare = ("architectures", "num_hidden_layers", "num_attention_heads", *sizes)
    config = config_of({name: raw[name] for name in bare})
    inner, shared, experts = {"V2": (1407, 2, 64), "V3": (2048, 1, 256)}[config.architecture[8:10]]
    assert (config.moe.intermediate_size, config.moe.num_experts) == (inner, experts)
    assert config.moe.shared_intermediate_size == shared * inner
    assert (config.mla, config.moe.groups is None) == (
        MLAConfig(1536, 512, 128, 64, 128),
        raw is V2,
    )


@pytest.mark.parametrize(
    "raw, fields, error, message",
    [
        (V3, {"topk_method": "greedy"}, UnsupportedModelError, "topk_method .greedy. is not impl"),
        (V3, {"scoring_func": "softmax"}, UnsupportedModelError, "scoring_func .softmax. is not"),
        (V2, {"topk_method": "noaux_tc"}, UnsupportedModelError, "topk_method .noaux_tc. is not"),
        (V2, {"norm_topk_prob": True}, UnsupportedModelError, "norm_topk_prob True is not impl"),
        (V3, {"moe_layer_freq": 2}, UnsupportedModelError, "moe_layer_freq 2 is not implemented"),
        (V3, {"mlp_bias": True}, UnsupportedModelError, "mlp_bias True is not implemented"),
        (V3, {"num_key_value_heads": 8}, ModelError, "8; it must be num_attention_heads 128"),
        (V3, {"n_group": 7}, ModelError, "n_group 7; it must be a divisor of n_routed_experts 256"),
        (V3, {"n_group": 256}, ModelError, "n_group 256; it must be .* with groups of 2 or more"),
        (V3, {"topk_group": 9}, ModelError, "topk_group 9; it must be at most n_group 8"),
        (
            V3,
            {"n_group": 128, "topk_group": 3},
            ModelError,
            "topk_group 3; .* the 8 experts of a token in groups of 2",
        ),
        (V3, {"kv_lora_rank": 0}, ModelError, "kv_lora_rank 0; it must be an integer of at least"),
        (V3, {"qk_rope_head_dim": 63}, ModelError, "leave an even part of head_dim 63"),
        (V3, {"rope_interleave": 1}, ModelError, "rope_interleave 1; it must be true or false"),
        (V3, {"num_nextn_predict_layers": -1}, ModelError, "num_nextn_predict_layers -1; it must"),
        (
            V3,
            {"architectures": ["LlamaForCausalLM"]},
            UnsupportedModelError,
            "is not implemented for LlamaForCausalLM",
        ),
    ],
)
def test_what_is_not_implemented_is_refused(raw, fields, error, message):
    with pytest.raises(error, match=message):
        config_of(raw, **fields)


@pytest.fixture
def files():
    """The config and the tensors of a tiny model."""
    member = GOLDEN["members"]["deepseek_v3"]
    return member["config"], family_members.tensors(member["shapes"])


def test_layers_for_further_tokens_are_beside_the_model(tmp_path, files, caplog):
    raw, tensors = files
    further = {f"model.layers.3.{name}.weight": np.zeros(4) for name in ("eh_proj", "enorm")}
    with caplog.at_level(logging.INFO, "jaxserve"):
        write_hf(tmp_path / "one", raw | {"num_nextn_predict_layers": 1}, tensors | further)
        open_checkpoint(tmp_path / "one")
    assert "tensors beside the model's: 2 (model.layers.3.*)" in caplog.text
    write_hf(tmp_path / "none", raw | {"num_nextn_predict_layers": 0}, tensors | further)
    with pytest.raises(WeightsError, match=r"layers\.3\.eh_proj\.weight is not used by the model"):
        open_checkpoint(tmp_path / "none")


def test_corrections_of_experts_stay_in_float32(tmp_path, files):
    raw, tensors = files
    checkpoint = open_checkpoint(write_hf(tmp_path, raw, tensors))
    specs = param_specs(checkpoint.config)
    params = load_params(checkpoint, specs, dtype="bfloat16")
    correction = params["layers"][1]["router_correction"]
    stored = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
    np.testing.assert_array_equal(correction, stored)
    others = [array.dtype for array in jax.tree.leaves(params) if array.dtype != "bfloat16"]
    assert others == [correction.dtype] * 2
    assert correction.dtype == np.float32


def test_keys_and_values_are_cut_from_one_tensor(tmp_path, files):
    raw, tensors = files
    checkpoint = open_checkpoint(write_hf(tmp_path, raw, tensors))
    params = load_params(checkpoint, param_specs(checkpoint.config), dtype="float32")
    both = tensors["model.layers.0.self_attn.kv_b_proj.weight"].reshape(1, 4, 12 + 10, 20)
    np.testing.assert_array_equal(params["layers"][0]["keys"], both[:, :, :12])
    np.testing.assert_array_equal(params["layers"][0]["values"], both[:, :, 12:])
    short = {"model.layers.0.self_attn.kv_b_proj.weight": np.zeros((87, 20), np.float32)}
    write_hf(tmp_path, raw, tensors | short)
    with pytest.raises(WeightsError, match=r"kv_b_proj.weight has shape \[87, 20\]; the config"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("member", ["deepseek_v2", "deepseek_v2_groups", "deepseek_v3"])
@pytest.mark.parametrize("apart", [False, True])
def test_gguf(tmp_path, member, apart):
    """Files of llama.cpp before and since it has keys and values apart, against the directory."""
    raw, tensors = GOLDEN["members"][member]["config"], GOLDEN["members"][member]["shapes"]
    tensors = family_members.tensors(tensors)
    yarn = GOLDEN["members"]["deepseek_v3"]["config"]["rope_parameters"]
    yarn = yarn | {"mscale": 0.8, "mscale_all_dim": 0.8}
    raw = raw | {"attention_bias": False, "rope_parameters": yarn, "rope_theta": yarn["rope_theta"]}
    tensors = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith(".bias")  # of projections
    }
    own = raw | {"num_nextn_predict_layers": 0}
    directory = write_hf(tmp_path / "hf", own, tensors)
    nope, rotated, value, rank = 12, 8, 10, 20
    metadata = {
        "leading_dense_block_count": 1,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotated if apart else nope + rotated,
        "attention.value_length": rank if apart else value,
        "rope.dimension_count": rotated,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": yarn["factor"],
        "rope.scaling.original_context_length": yarn["original_max_position_embeddings"],
        "rope.scaling.yarn_log_multiplier": 0.1 * 0.8,
        "expert_count": raw["n_routed_experts"],
        "expert_used_count": raw["num_experts_per_tok"],
        "expert_shared_count": raw["n_shared_experts"],
        "expert_feed_forward_length": raw["moe_intermediate_size"],
        "expert_weights_scale": raw["routed_scaling_factor"],
        "expert_gating_func": 2 if member == "deepseek_v3" else 1,
        "expert_group_count": 1 if member == "deepseek_v2" else raw["n_group"],
        "expert_group_used_count": 1 if member == "deepseek_v2" else raw["topk_group"],
    }
    if raw["q_lora_rank"] is not None:
        metadata["attention.q_lora_rank"] = raw["q_lora_rank"]
    if apart:
        metadata |= {"attention.key_length_mla": nope + rotated}
        metadata |= {"attention.value_length_mla": value}
    stored = {}
    for name, tensor in tensors.items():
        if apart and name.endswith("kv_b_proj.weight"):
            stem, both = name.removesuffix("kv_b_proj.weight"), tensor.reshape(4, -1, rank)
            stored[f"{stem}k_b_proj.weight"] = both[:, :nope].swapaxes(1, 2)
            stored[f"{stem}v_b_proj.weight"] = both[:, nope:]
        else:
            stored[name.replace("correction_bias", "correction.bias")] = tensor
    path = write_gguf(
        tmp_path / "m.gguf",
        raw | {"head_dim": 1, "rope_theta": float(yarn["rope_theta"])},
        stored,
        architecture="deepseek2",
        metadata={f"deepseek2.{key}": value for key, value in metadata.items()}
        | {"tokenizer.ggml.bos_token_id": raw["bos_token_id"]}
        | ({"deepseek2.expert_weights_norm": True} if member == "deepseek_v3" else {}),
    )
    ours, theirs = open_checkpoint(path), open_checkpoint(directory)
    jax.tree.map(
        np.testing.assert_array_equal,
        *(load_params(each, param_specs(each.config), dtype="float32") for each in (ours, theirs)),
    )
    for field in vars(theirs.config).keys() - {"name", "rms_norm_eps", "moe"}:
        left, right = getattr(ours.config, field), getattr(theirs.config, field)
        assert left == (pytest.approx(right) if field == "query_pre_attn_scalar" else right), field
    scale = theirs.config.moe.routed_scale
    moe = dataclasses.replace(ours.config.moe, routed_scale=scale)
    assert moe == theirs.config.moe
    assert ours.config.moe.routed_scale == pytest.approx(scale, rel=1e-7)
