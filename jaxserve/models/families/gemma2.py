"""The Gemma 2 family (2408.00118): a Llama that norms the input and the output of each block.

Norms multiply by one plus their weight, embeddings by the root of their width, and the gate of the
MLP is a GELU. Attention scores and logits have soft caps; every other layer has a window.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.core.model_config import LayerKind, ModelConfig
from jaxserve.models import layers
from jaxserve.models.config_fields import WINDOW_BY_LAYER, only
from jaxserve.models.families import llama
from jaxserve.models.family import Attention, Params, ParamSpec, one_tensor
from jaxserve.models.hf_config import common_config, flag, number, with_layer_types

# Defaults of the transformers class, which a config.json may leave out.
_DEFAULTS = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    """ModelConfig from the parsed `config.json`."""
    raw = with_layer_types(_DEFAULTS | raw, period=2)
    only(raw, "sliding_window_size", None, raw["sliding_window"])  # its older name
    return gemma_config(
        raw,
        implements=("attn_logit_softcapping", "sliding_window_size"),
        attention_soft_cap=_soft_cap(raw, "attn_logit_softcapping"),
    )


def gemma_config(
    raw: dict[str, Any], implements: tuple[str, ...] = (), **fields: Any
) -> ModelConfig:
    """What the configs of Gemma 2 and 3 share, with further fields given by name."""
    biased = flag(raw, "attention_bias")
    return common_config(
        raw,
        implements=(
            *("attention_bias", "query_pre_attn_scalar", "final_logit_softcapping"),
            *WINDOW_BY_LAYER,
            *implements,
        ),
        activation="gelu_pytorch_tanh",
        qkv_bias=biased,
        output_bias=biased,
        query_pre_attn_scalar=number(raw, "query_pre_attn_scalar"),
        logit_soft_cap=_soft_cap(raw, "final_logit_softcapping"),
        **fields,
    )


def _soft_cap(raw: dict[str, Any], name: str) -> float | None:
    return None if raw.get(name) is None else number(raw, name)


def param_specs(config: ModelConfig) -> Params:
    """Llama's parameters, with norms around each block."""
    specs = llama.param_specs(config)
    for index, layer_specs in enumerate(specs["layers"]):
        layer_specs |= _norm_specs(config, f"model.layers.{index}.")
        for name in ("q_norm", "k_norm"):
            if name in layer_specs:
                layer_specs[name] = dataclasses.replace(layer_specs[name], init="zeros")
    specs["final_norm"] = dataclasses.replace(specs["final_norm"], init="zeros")
    return specs


def _norm_specs(config: ModelConfig, prefix: str) -> dict[str, ParamSpec]:
    names = {
        "attn_norm": "input_layernorm",
        "post_attn_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
    }
    return {
        ours: one_tensor(f"{prefix}{theirs}.weight", (config.hidden_size,), ("embed",), "zeros")
        for ours, theirs in names.items()
    }


def embed(
    params: Params, config: ModelConfig, token_ids: jax.Array, positions: jax.Array
) -> tuple[jax.Array, llama.Rotations]:
    """Llama's embeddings times the root of their width, which is rounded to their dtype."""
    x, rotations = llama.embed(params, config, token_ids, positions)
    return x * jnp.asarray(math.sqrt(config.hidden_size), x.dtype), rotations


def layer(
    p: Params,
    config: ModelConfig,
    kind: LayerKind,
    x: jax.Array,
    rotations: llama.Rotations,
    attention: Attention,
) -> jax.Array:
    """x plus its attention, then plus its MLP, each of which has a norm before and one after."""
    norm = functools.partial(_norm, eps=config.rms_norm_eps)
    q, k, v = llama.project_qkv(config, p, norm(x, p["attn_norm"]))
    if config.qk_norm:
        q, k = norm(q, p["q_norm"]), norm(k, p["k_norm"])
    attended = llama.attend(config, kind, (q, k, v), rotations, attention)
    out = layers.row_parallel(p["attn_out"], attended, p.get("attn_out_bias"))
    x = x + norm(out, p["post_attn_norm"])
    normed = norm(x, p["mlp_norm"])
    out = layers.gated_mlp(normed, p["gate_up"], p["down"], activation=jax.nn.gelu)
    return x + norm(out, p["post_mlp_norm"])


def final_norm(params: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
    """Normed final hidden states."""
    return _norm(x, params["final_norm"], config.rms_norm_eps)


def _norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm times 1 + weight, in float32 throughout."""
    wide, scale = x.astype(jnp.float32), 1.0 + weight.astype(jnp.float32)
    return layers.rms_norm(wide, scale, eps).astype(x.dtype)


FAMILY = dataclasses.replace(
    llama.FAMILY,
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    embed=embed,
    layer=layer,
    final_norm=final_norm,
)
