"""The one oracle: a dense, unbatched, cache-free forward pass of a model.

Whatever the engine does on its way (batch, chunk, page, preempt, reuse a prefix), a request's
greedy tokens must equal `greedy`'s.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.model_config import ModelConfig
from jaxserve.models.family import Attention, Family, Params, ParamSpec
from jaxserve.models.registry import get_family

_SHORTEST_PAD = 32
# Tests compile longer than they run: unoptimised code is ready four times sooner.
_COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}


def dense_logits(
    family: Family,
    params: Params,
    config: ModelConfig,
    token_ids: Sequence[int],
    kv_cache_dtype: str = "auto",
) -> np.ndarray:
    """Logits float32 [tokens, vocab] after each of `token_ids`."""
    rows, token_ids = np.arange(len(token_ids)), np.asarray(token_ids, np.int32)
    return np.asarray(_logits(family, config, kv_cache_dtype, params, token_ids, rows))


def greedy(
    family: Family,
    params: Params,
    config: ModelConfig,
    prompt: Sequence[int],
    max_tokens: int,
    eos: Collection[int] = (),
) -> list[int]:
    """The most likely continuation token by token, up to and with the first token of `eos`.

    Everything is recomputed for each token. Padding at the end, which causal attention cannot
    see, keeps the number of compiled shapes small.
    """
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        padded = np.zeros(max(_SHORTEST_PAD, 1 << (len(tokens) - 1).bit_length()), np.int32)
        padded[: len(tokens)] = tokens
        last = np.asarray([len(tokens) - 1])
        tokens.append(int(jnp.argmax(_logits(family, config, "auto", params, padded, last))))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


def tiny_model(
    architecture: str = "LlamaForCausalLM", seed: int = 0, **overrides: Any
) -> tuple[Family, ModelConfig, Params]:
    """A random float32 model: 2 layers, 4 query heads over 2 KV heads of 16, vocabulary of 128.

    `overrides` are fields of a Hugging Face `config.json`. Random logits are nearly uniform, so
    the final norm is scaled up: the best token then leads by more than rounding can make up for.
    """
    raw = {
        "architectures": [architecture],
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    if architecture.startswith(("GptOss", "Mixtral", "Olmoe")) or "Moe" in architecture:
        raw |= {"num_experts": 4, "num_experts_per_tok": 2}
        raw |= {"moe_intermediate_size": 48} if architecture.startswith("Qwen") else {}
        raw |= {"shared_expert_intermediate_size": 48} if architecture.startswith("Qwen2") else {}
    if architecture.startswith("Deepseek"):
        raw |= {
            "head_dim": None,
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
        }
    family = get_family(architecture)
    config = family.config_from_hf(raw | overrides)
    rng = np.random.default_rng(seed)
    params = jax.tree.map(functools.partial(_draw, rng), family.param_specs(config))
    params["final_norm"] = params["final_norm"] * 4
    return family, config, params


def _draw(rng: np.random.Generator, spec: ParamSpec) -> jax.Array:
    """Values that leave no parameter without effect: norms are not all one, biases not zero."""
    center, spread = {"ones": (1.0, 0.2), "zeros": (0.0, 0.2), "normal": (0.0, 0.2)}[spec.init]
    return jnp.asarray(rng.normal(center, spread, spec.shape), jnp.float32)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=_COMPILER_OPTIONS)
def _logits(
    family: Family,
    config: ModelConfig,
    kv_cache_dtype: str,
    params: Params,
    token_ids: jax.Array,
    rows: jax.Array,
) -> jax.Array:
    """Logits float32 [rows, vocab] after the tokens at `rows`."""
    with jax.default_matmul_precision("highest"):
        positions = jnp.arange(token_ids.size, dtype=jnp.int32)
        attention = dense_attention(config, kv_cache_dtype)
        hidden = family.forward(params, config, token_ids, positions, attention)
        return family.logits(params, config, hidden[rows])


def _rounded(x: jax.Array, kv_cache_dtype: str) -> jax.Array:
    """Keys or values [tokens, kv_heads, head_dim] as quantized pages keep them: the largest of a
    token and head becomes the largest number of the dtype."""
    if kv_cache_dtype == "auto":
        return x
    dtype, largest = {
        "int8": (jnp.int8, 127),
        "int4": (jnp.int8, 7),
        "fp8": (jnp.float8_e4m3fn, 448),
    }[kv_cache_dtype]
    if kv_cache_dtype == "int4":
        x = x @ _rotation(x.shape[-1])
    peak = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    scale = jnp.where(peak > 0, peak, 1) / largest
    elements = x / scale if kv_cache_dtype == "fp8" else jnp.round(x / scale)
    kept = elements.astype(dtype).astype(jnp.float32) * scale
    return kept @ _rotation(x.shape[-1]) if kv_cache_dtype == "int4" else kept


def _rotation(dim: int) -> jax.Array:
    """Hadamard's matrix of `dim`, a power of two, in Sylvester's order."""
    place = np.arange(dim)
    common = place[:, None] & place
    odd = sum(common >> bit & 1 for bit in range(dim.bit_length())) % 2
    return jnp.asarray((1 - 2 * odd) / math.sqrt(dim), jnp.float32)


def dense_attention(config: ModelConfig, kv_cache_dtype: str = "auto") -> Attention:
    """Causal attention over one whole sequence, as its definition reads."""

    def attention(
        layer: int,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        window: int | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        k, v = (_rounded(x, kv_cache_dtype) for x in (k, v))
        k, v = (jnp.repeat(x, config.queries_per_kv, axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) * config.attention_scale
        if cap := config.attention_soft_cap:
            scores = cap * jnp.tanh(scores / cap)
        place = jnp.arange(q.shape[0])
        age = place[:, None] - place[None, :]
        seen = (age >= 0) if window is None else (age >= 0) & (age < window)
        scores = jnp.where(seen, scores, -jnp.inf)
        if sinks is not None:
            column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
            scores = jnp.concatenate([scores, column], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : len(place)]
        return jnp.einsum("hqk,khd->qhd", weights, v)

    return attention
