"""The Llama family: Llama 2 and 3, SmolLM2 and 3, Mistral, Qwen2 and 2.5, Qwen3.

Pre-norm blocks of rotary grouped-query attention and a SwiGLU MLP. The config selects the
differences: biases, per-head norms on queries and keys, sliding windows, layers without rotation.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxserve.core.model_config import LayerKind, ModelConfig
from jaxserve.models import layers, moe, rope
from jaxserve.models.config_fields import WINDOW, WINDOW_SWITCHED
from jaxserve.models.family import Attention, Family, Params, ParamSpec, TensorPart, one_tensor
from jaxserve.models.hf_config import common_config, flag, integer, malformed

# Defaults of the transformers classes, which a config.json may leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {"use_sliding_window": False, "max_window_layers": 28},
    "Qwen3ForCausalLM": {"use_sliding_window": False, "max_window_layers": 28, "head_dim": 128},
    "SmolLM3ForCausalLM": {
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0,
    },
}
_OWN_FIELDS = {
    "MistralForCausalLM": WINDOW,
    "Qwen2ForCausalLM": WINDOW_SWITCHED,
    "Qwen3ForCausalLM": WINDOW_SWITCHED,
    "SmolLM3ForCausalLM": (*WINDOW_SWITCHED, "no_rope_layers", "no_rope_layer_interval"),
}


def config_from_hf(raw: dict[str, Any]) -> ModelConfig:
    """ModelConfig of any member, from its parsed `config.json`."""
    architecture = raw["architectures"][0]
    raw = _DEFAULTS.get(architecture, {}) | raw
    everywhere = flag(raw, "attention_bias")
    config = common_config(
        raw,
        implements=("attention_bias", "mlp_bias", *_OWN_FIELDS.get(architecture, ())),
        qkv_bias=everywhere or architecture == "Qwen2ForCausalLM",
        output_bias=everywhere,
        mlp_bias=flag(raw, "mlp_bias"),
        qk_norm=architecture == "Qwen3ForCausalLM",
    )
    if architecture == "SmolLM3ForCausalLM":
        config = dataclasses.replace(config, rope_layers=_rope_layers(raw, config.num_layers))
    return config


def _rope_layers(raw: dict[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Whether each layer rotates; `no_rope_layers`, despite its name, has 1 where it does."""
    interval = integer(raw, "no_rope_layer_interval", 4)
    flags = raw.get("no_rope_layers") or [(i + 1) % interval for i in range(num_layers)]
    if not isinstance(flags, list) or len(flags) != num_layers:
        raise malformed("no_rope_layers", flags, f"a list of {num_layers}, one for each layer")
    return tuple(bool(flag) for flag in flags)


def param_specs(config: ModelConfig) -> Params:
    """Tree of ParamSpec: shapes, logical axes, and the checkpoint tensors each is made of."""
    vocab, hidden = config.vocab_size, config.hidden_size
    specs: Params = {
        "embed": one_tensor(
            "model.embed_tokens.weight", (vocab, hidden), ("vocab", "embed"), num_inputs=1
        ),
        "final_norm": one_tensor("model.norm.weight", (hidden,), ("embed",), init="ones"),
        "layers": [layer_specs(config, f"model.layers.{i}.") for i in range(config.num_layers)],
    }
    if not config.tie_word_embeddings:
        specs["lm_head"] = one_tensor(
            "lm_head.weight", (vocab, hidden), ("vocab", "embed"), num_inputs=1
        )
    return specs


def layer_specs(config: ModelConfig, prefix: str) -> dict[str, ParamSpec]:
    """Those of one layer, whose tensors have names that begin with `prefix`."""
    hidden, ff = config.hidden_size, config.intermediate_size
    kv_heads, group, dim = config.num_kv_heads, config.queries_per_kv, config.head_dim
    attn, mlp = prefix + "self_attn.", prefix + "mlp."

    def qkv(suffix: str, inputs: tuple[int, ...], axes: tuple[str, ...]) -> ParamSpec:
        """Queries, key and value of each KV head side by side, so that they shard together."""
        return ParamSpec(
            shape=(kv_heads, group + 2, dim, *inputs),
            axes=("kv_heads", "qkv", "head_dim", *axes),
            parts=(
                TensorPart(attn + "q_proj." + suffix, (kv_heads, group, dim, *inputs)),
                TensorPart(attn + "k_proj." + suffix, (kv_heads, 1, dim, *inputs)),
                TensorPart(attn + "v_proj." + suffix, (kv_heads, 1, dim, *inputs)),
            ),
            concat_axis=1,
            init="normal" if inputs else "zeros",
            num_inputs=len(inputs),
        )

    def gate_up(suffix: str, inputs: tuple[int, ...], axes: tuple[str, ...]) -> ParamSpec:
        return ParamSpec(
            shape=(2, ff, *inputs),
            axes=("gate_up", "mlp", *axes),
            parts=(
                TensorPart(mlp + "gate_proj." + suffix, (1, ff, *inputs)),
                TensorPart(mlp + "up_proj." + suffix, (1, ff, *inputs)),
            ),
            init="normal" if inputs else "zeros",
            num_inputs=len(inputs),
        )

    out_axes = ("embed", "kv_heads", "queries", "head_dim")
    specs = {
        "attn_norm": one_tensor(
            prefix + "input_layernorm.weight", (hidden,), ("embed",), init="ones"
        ),
        "qkv": qkv("weight", (hidden,), ("embed",)),
        "attn_out": one_tensor(
            attn + "o_proj.weight", (hidden, kv_heads, group, dim), out_axes, num_inputs=3
        ),
        "mlp_norm": one_tensor(
            prefix + "post_attention_layernorm.weight", (hidden,), ("embed",), init="ones"
        ),
        "gate_up": gate_up("weight", (hidden,), ("embed",)),
        "down": one_tensor(mlp + "down_proj.weight", (hidden, ff), ("embed", "mlp"), num_inputs=1),
    }
    if config.qkv_bias:
        specs["qkv_bias"] = qkv("bias", (), ())
    if config.output_bias:
        specs["attn_out_bias"] = one_tensor(
            attn + "o_proj.bias", (hidden,), ("embed",), init="zeros"
        )
    if config.mlp_bias:
        specs["gate_up_bias"] = gate_up("bias", (), ())
        specs["down_bias"] = one_tensor(mlp + "down_proj.bias", (hidden,), ("embed",), init="zeros")
    if config.qk_norm:
        specs["q_norm"] = one_tensor(attn + "q_norm.weight", (dim,), ("head_dim",), init="ones")
        specs["k_norm"] = one_tensor(attn + "k_norm.weight", (dim,), ("head_dim",), init="ones")
    if config.attention_sinks:
        specs["sinks"] = one_tensor(attn + "sinks", (kv_heads, group), ("kv_heads", "queries"))
    return specs


Rotations = tuple[jax.Array, jax.Array]


def embed(
    params: Params, config: ModelConfig, token_ids: jax.Array, positions: jax.Array
) -> tuple[jax.Array, Rotations]:
    """Embeddings [tokens, hidden] and the rotations of int32 token_ids and positions [tokens]."""
    rotations = rope.rotation(config.rope, config.max_position_embeddings, positions)
    return layers.embed(params["embed"], token_ids, params["final_norm"].dtype), rotations


def layer(
    p: Params,
    config: ModelConfig,
    kind: LayerKind,
    x: layers.Residual,
    rotations: Rotations,
    attention: Attention,
) -> layers.Residual:
    """One pre-norm block: x [tokens, hidden] plus its attention, plus its MLP. A layer that drafts
    has no norm before its attention (models/drafters/eagle.py)."""
    if "attn_norm" in p:
        x, normed = layers.normed(x, p["attn_norm"], config.rms_norm_eps)
    else:
        x = normed = layers.settled(x)
    q, k, v = project_qkv(config, p, normed)
    if config.qk_norm:
        q = layers.rms_norm(q, p["q_norm"], config.rms_norm_eps)
        k = layers.rms_norm(k, p["k_norm"], config.rms_norm_eps)
    attended = attend(config, kind, (q, k, v), rotations, attention, p.get("sinks"))
    x = layers.add_row_parallel(x, p["attn_out"], attended, p.get("attn_out_bias"))
    return add_mlp(p, config, kind, *layers.normed(x, p["mlp_norm"], config.rms_norm_eps))


def add_mlp(
    p: Params, config: ModelConfig, kind: LayerKind, x: jax.Array, normed: jax.Array
) -> layers.Residual:
    """x [tokens, hidden] plus the MLP of `normed`, its norm, or plus its mixture of experts."""
    if kind.sparse:
        return x + moe.mixture(config.moe, p, normed)
    gated = layers.gated(normed, p["gate_up"], p.get("gate_up_bias"))
    return layers.add_row_parallel(x, p["down"], gated, p.get("down_bias"))


def final_norm(params: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
    """Normed final hidden states [tokens, hidden]."""
    return layers.rms_norm(x, params["final_norm"], config.rms_norm_eps)


def project_qkv(
    config: ModelConfig, p: dict[str, jax.Array], x: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [tokens, heads, dim], keys and values [tokens, kv_heads, dim] of x."""
    kv_heads, group, dim = config.num_kv_heads, config.queries_per_kv, config.head_dim
    qkv = layers.column_parallel(p["qkv"], x, p.get("qkv_bias"))
    qkv = qkv.reshape(-1, kv_heads, group + 2, dim)
    q = qkv[:, :, :group].reshape(-1, config.num_heads, dim)
    return q, qkv[:, :, group], qkv[:, :, group + 1]


def attend(
    config: ModelConfig,
    kind: LayerKind,
    heads: tuple[jax.Array, jax.Array, jax.Array],
    rotations: Rotations,
    attention: Attention,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of one layer over the result of `project_qkv`: [tokens, heads * dim].

    Rotates queries and keys first, if the layer does. `sinks` [kv_heads, group] are those of its
    heads.
    """
    q, k, v = heads
    if kind.rotates:
        q, k = rope.rotate(q, *rotations), rope.rotate(k, *rotations)
    if sinks is not None:
        sinks = sinks.reshape(-1)
    attended = attention(q, k, v, window=kind.window, sinks=sinks)
    return attended.reshape(len(attended), -1)


def logits(params: Params, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Logits float32 [rows, vocab] of hidden states [rows, hidden]."""
    head = params.get("lm_head", params["embed"])
    return layers.tied_or_own_logits(head, hidden, config.vocab_size, config.logit_soft_cap)


FAMILY = Family(
    config_from_hf=config_from_hf,
    param_specs=param_specs,
    embed=embed,
    layer=layer,
    final_norm=final_norm,
    logits=logits,
)
