"""The OLMo 2 family (2501.00656): a Llama that norms the output of each block, not its input.

Queries and keys are normed too, over all heads at once. docs/adding-a-model.md walks through this
file.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.core.model_config import LayerKind, ModelConfig
from jaxserve.models import layers, parallel
from jaxserve.models.families import llama
from jaxserve.models.family import Attention, Params, ParamSpec, one_tensor
from jaxserve.models.hf_config import common_config, flag


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    """ModelConfig from the parsed `config.json`."""
    biased = flag(raw, "attention_bias")
    return common_config(raw, implements=("attention_bias",), qkv_bias=biased, output_bias=biased)


def param_specs(config: ModelConfig) -> Params:
    """Llama's parameters, with OLMo 2's norms."""
    specs = llama.param_specs(config)
    for index, layer_specs in enumerate(specs["layers"]):
        layer_specs |= _norm_specs(config, f"model.layers.{index}.")
    return specs


def _norm_specs(config: ModelConfig, prefix: str) -> dict[str, ParamSpec]:
    hidden = (config.hidden_size,), ("embed",)
    return head_norm_specs(config, prefix) | {
        "attn_norm": one_tensor(prefix + "post_attention_layernorm.weight", *hidden, "ones"),
        "mlp_norm": one_tensor(prefix + "post_feedforward_layernorm.weight", *hidden, "ones"),
    }


def head_norm_specs(config: ModelConfig, prefix: str) -> dict[str, ParamSpec]:
    """Norms of queries and of keys over all heads, of the layer whose tensors begin with
    `prefix`."""
    kv_heads, group, dim = config.num_kv_heads, config.queries_per_kv, config.head_dim
    queries = (kv_heads, group, dim), ("kv_heads", "queries", "head_dim")
    keys = (kv_heads, dim), ("kv_heads", "head_dim")
    return {
        "q_norm": one_tensor(prefix + "self_attn.q_norm.weight", *queries, "ones"),
        "k_norm": one_tensor(prefix + "self_attn.k_norm.weight", *keys, "ones"),
    }


def layer(
    p: Params,
    config: ModelConfig,
    kind: LayerKind,
    x: jax.Array,
    rotations: llama.Rotations,
    attention: Attention,
) -> jax.Array:
    """One post-norm block: x [tokens, hidden] plus its normed attention, plus its normed MLP."""
    eps = config.rms_norm_eps
    q, k, v = llama.project_qkv(config, p, x)
    heads = (*norm_heads(p, config, q, k), v)
    attended = llama.attend(config, kind, heads, rotations, attention)
    out = layers.row_parallel(p["attn_out"], attended, p.get("attn_out_bias"))
    x = x + layers.rms_norm(out, p["attn_norm"], eps)
    out = layers.gated_mlp(x, p["gate_up"], p["down"])
    return x + layers.rms_norm(out, p["mlp_norm"], eps)


def norm_heads(
    p: Params, config: ModelConfig, q: jax.Array, k: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Queries and keys of `llama.project_qkv`, each normed over all heads together."""
    num_heads, num_kv_heads = config.normed_heads or (config.num_heads, config.num_kv_heads)
    q = _norm_all_heads(q, p["q_norm"], config.rms_norm_eps, num_heads)
    return q, _norm_all_heads(k, p["k_norm"], config.rms_norm_eps, num_kv_heads)


def _norm_all_heads(x: jax.Array, weight: jax.Array, eps: float, num_heads: int) -> jax.Array:
    """Root-mean-square norm of x [tokens, heads, head_dim] over all heads together.

    `num_heads` are those of all ranks, without padding, which is zero.
    """
    wide = x.astype(jnp.float32)
    squares = jnp.sum(wide * wide, axis=(1, 2), keepdims=True)
    mean = parallel.sum_over_heads(squares) / (num_heads * x.shape[-1])
    return (wide * jax.lax.rsqrt(mean + eps)).astype(x.dtype) * weight.reshape(x.shape[1:])


FAMILY = dataclasses.replace(
    llama.FAMILY, config_from_hf=config_from_hf, param_specs=param_specs, layer=layer
)
