"""The OLMoE family (2409.02060): a Llama with mixtures of experts, whose queries and keys are
normed over all heads at once, and clipped."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.core.model_config import LayerKind, ModelConfig
from jaxserve.models import layers, moe, moe_specs
from jaxserve.models.families import llama, olmo2
from jaxserve.models.family import Attention, Params
from jaxserve.models.hf_config import common_config, flag, integer, number

# Defaults of the transformers class, which a config.json may leave out.
_DEFAULTS = {"num_experts_per_tok": 8, "rms_norm_eps": 1e-5}


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    """ModelConfig from the parsed `config.json`."""
    raw = {name: value for name, value in raw.items() if name != "clip_qkv" or value is not None}
    raw = _DEFAULTS | raw
    biased = flag(raw, "attention_bias")
    return common_config(
        raw,
        implements=("attention_bias", "clip_qkv", "norm_topk_prob", *moe_specs.FIELDS),
        moe=moe_specs.moe_config(raw, (True,) * integer(raw, "num_hidden_layers"), num_experts=64),
        qkv_bias=biased,
        output_bias=biased,
        clip_qkv=number(raw, "clip_qkv", None),
    )


def param_specs(config: ModelConfig) -> Params:
    """Llama's parameters, with experts, and norms of queries and keys."""
    specs = llama.param_specs(config)
    for index, layer_specs in enumerate(specs["layers"]):
        layer_specs |= olmo2.head_norm_specs(config, f"model.layers.{index}.")
    return moe_specs.with_experts(specs, config, "mlp", ("gate_proj", "up_proj", "down_proj"))


def layer(
    p: Params,
    config: ModelConfig,
    kind: LayerKind,
    x: jax.Array,
    rotations: llama.Rotations,
    attention: Attention,
) -> jax.Array:
    """One pre-norm block: x plus its attention, plus its mixture."""
    normed = layers.rms_norm(x, p["attn_norm"], config.rms_norm_eps)
    q, k, v = llama.project_qkv(config, p, normed)
    heads = (*olmo2.norm_heads(p, config, q, k), v)
    if config.clip_qkv is not None:
        heads = tuple(jnp.clip(each, -config.clip_qkv, config.clip_qkv) for each in heads)
    attended = llama.attend(config, kind, heads, rotations, attention)
    x = x + layers.row_parallel(p["attn_out"], attended, p.get("attn_out_bias"))
    normed = layers.rms_norm(x, p["mlp_norm"], config.rms_norm_eps)
    return x + moe.mixture(config.moe, p, normed)


FAMILY = dataclasses.replace(
    llama.FAMILY, config_from_hf=config_from_hf, param_specs=param_specs, layer=layer
)
