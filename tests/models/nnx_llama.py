"""A small Llama in Flax NNX, with the modules of a Hugging Face checkpoint."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.core.model_config import ModelConfig


class _Attention(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self._theta = config.rope.theta
        hidden, dim = config.hidden_size, config.head_dim
        queries, keys = (config.num_heads, dim), (config.num_kv_heads, dim)
        plain = {"use_bias": False, "rngs": rngs}
        self.q_proj = nnx.LinearGeneral(hidden, queries, **plain)
        self.k_proj = nnx.LinearGeneral(hidden, keys, **plain)
        self.v_proj = nnx.LinearGeneral(hidden, keys, **plain)
        self.o_proj = nnx.LinearGeneral(queries, hidden, axis=(-2, -1), **plain)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = self._rotated(self.q_proj(x)), self._rotated(self.k_proj(x)), self.v_proj(x)
        return self.o_proj(jax.nn.dot_product_attention(q, k, v, is_causal=True))

    def _rotated(self, x: jax.Array) -> jax.Array:
        half = x.shape[-1] // 2
        frequencies = self._theta ** (-jnp.arange(half) / half)
        angles = jnp.arange(x.shape[1])[:, None, None] * frequencies
        first, second = x[..., :half], x[..., half:]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class _MLP(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        sizes, plain = (config.hidden_size, config.intermediate_size), {"use_bias": False}
        self.gate_proj = nnx.Linear(*sizes, **plain, rngs=rngs)
        self.up_proj = nnx.Linear(*sizes, **plain, rngs=rngs)
        self.down_proj = nnx.Linear(*sizes[::-1], **plain, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class _Block(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        norm = {"epsilon": config.rms_norm_eps, "rngs": rngs}
        self.input_layernorm = nnx.RMSNorm(config.hidden_size, **norm)
        self.self_attn = _Attention(config, rngs)
        self.post_attention_layernorm = nnx.RMSNorm(config.hidden_size, **norm)
        self.mlp = _MLP(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class NNXLlama(nnx.Module):
    """Logits [batch, tokens, vocab] of int32 tokens [batch, tokens]."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        self.embed_tokens = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs)
        self.layers = nnx.List([_Block(config, rngs) for _ in range(config.num_layers)])
        self.norm = nnx.RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, rngs=rngs)
        self.lm_head = nnx.Linear(config.hidden_size, config.vocab_size, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x)
        return self.lm_head(self.norm(x))
