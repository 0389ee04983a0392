"""Multi-head latent attention (DeepSeek V2, 2405.04434).

A token keeps one latent for all heads and one rotated key that they share. The keys of a head are a
matrix times the latent, and so are its values. Of what is in the cache neither is ever computed:
the one matrix is applied to the queries, the other to the results, and in between all heads attend
to the latents themselves, as to one KV head. Within `uncompressed` the tokens of a prefill chunk
attend to each other by keys and values of heads, which takes fewer products.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxserve.core.model_config import LayerKind, ModelConfig
from jaxserve.models import layers, parallel, rope
from jaxserve.models.family import Attention, Params, ParamSpec, TensorPart, one_tensor

_EPS = 1e-6
"""Of the norms of latents, whatever `rms_norm_eps` is: so the models were trained."""


class OfHeads(NamedTuple):
    """What a layer's heads have beside latents.

    `new(tokens)` are the queries and keys [n, heads, nope_dim + rope_dim] and the values [n, heads,
    value_dim] of some of the step's tokens; `values(attended)` are results over values [n, heads,
    value_dim] of those over latents [n, heads, kv_rank], of a `dtype` if it is given.
    """

    new: Callable[[slice], tuple[jax.Array, jax.Array, jax.Array]]
    values: Callable[..., jax.Array]


class UncompressedAttention(Protocol):
    """Attention of one layer that may be over latents `k` [tokens, 1, kv_rank + rope_dim], of the
    queries `q` [tokens, heads, kv_rank + rope_dim], or over keys and values `of_heads`: returns
    [tokens, heads, value_dim]."""

    def __call__(
        self, q: jax.Array, k: jax.Array, of_heads: OfHeads, *, window: int | None
    ) -> jax.Array: ...


_uncompressed: contextvars.ContextVar[UncompressedAttention | None]
_uncompressed = contextvars.ContextVar("uncompressed", default=None)


@contextlib.contextmanager
def uncompressed(attention: UncompressedAttention | None) -> Iterator[None]:
    """Traces a layer whose attention is this one in place of its argument; None for that."""
    token = _uncompressed.set(attention)
    try:
        yield
    finally:
        _uncompressed.reset(token)


def with_latents(specs: Params, config: ModelConfig) -> Params:
    """A Llama's `specs` with latent attention in every layer."""
    for index, layer in enumerate(specs["layers"]):
        for name in ("qkv", "qkv_bias"):
            layer.pop(name, None)
        layer |= _attention_specs(config, f"model.layers.{index}.self_attn.")
    return specs


def _attention_specs(config: ModelConfig, prefix: str) -> dict[str, ParamSpec]:
    mla, hidden, heads = config.mla, config.hidden_size, config.num_heads
    of_query, of_latent = mla.nope_dim + mla.rope_dim, mla.kv_rank + mla.rope_dim
    of_heads = ("kv_heads", "queries", "head_dim")
    down = [("kv_a_proj_with_mqa", of_latent)]
    if mla.q_rank is None:
        up, query_inputs = "q_proj", hidden
    else:
        down.insert(0, ("q_a_proj", mla.q_rank))
        up, query_inputs = "q_b_proj", mla.q_rank

    def latents(suffix: str, inputs: tuple[int, ...], axes: tuple[str, ...]) -> ParamSpec:
        return ParamSpec(
            shape=(sum(size for _, size in down), *inputs),
            axes=(None, *axes),
            parts=tuple(
                TensorPart(f"{prefix}{name}.{suffix}", (size, *inputs)) for name, size in down
            ),
            init="normal" if inputs else "zeros",
            num_inputs=len(inputs),
        )

    def of_values_or_keys(first: int, dim: int) -> ParamSpec:
        """Each head's rows of the one tensor that has those of both."""
        rows, shape = mla.nope_dim + mla.value_dim, (1, heads, dim, mla.kv_rank)
        part = TensorPart(prefix + "kv_b_proj.weight", shape, first, rows, axis=2)
        return ParamSpec(shape, (*of_heads, None), (part,))

    specs = {
        "latents": latents("weight", (hidden,), ("embed",)),
        "queries": one_tensor(
            f"{prefix}{up}.weight",
            (1, heads, of_query, query_inputs),
            (*of_heads, "embed" if mla.q_rank is None else None),
            num_inputs=1,
        ),
        "kv_norm": one_tensor(
            prefix + "kv_a_layernorm.weight", (mla.kv_rank,), (None,), init="ones"
        ),
        "keys": of_values_or_keys(0, mla.nope_dim),
        "values": of_values_or_keys(mla.nope_dim, mla.value_dim),
        "attn_out": one_tensor(
            prefix + "o_proj.weight",
            (hidden, 1, heads, mla.value_dim),
            ("embed", *of_heads),
            num_inputs=3,
        ),
    }
    if mla.q_rank is not None:
        specs["q_norm"] = one_tensor(
            prefix + "q_a_layernorm.weight", (mla.q_rank,), (None,), init="ones"
        )
    if config.qkv_bias:
        specs["latents_bias"] = latents("bias", (), ())
    return specs


def attend(
    p: Params,
    config: ModelConfig,
    kind: LayerKind,
    x: jax.Array,
    rotations: tuple[jax.Array, jax.Array],
    attention: Attention,
) -> jax.Array:
    """Attention of one layer of x [tokens, hidden], before the output projection: [tokens, heads *
    value_dim]."""
    mla, heads = config.mla, config.num_heads
    latents = layers.replicated(p["latents"], x, p.get("latents_bias"))
    latents = parallel.gather_tokens(latents)
    q_latent, kv_latent, k_rotated = jnp.split(
        latents, (mla.q_rank or 0, (mla.q_rank or 0) + mla.kv_rank), axis=-1
    )
    if mla.q_rank is None:
        q = layers.column_parallel(p["queries"], x)
    else:
        q = layers.replicated(p["queries"], layers.rms_norm(q_latent, p["q_norm"], _EPS))
    q = q.reshape(-1, heads, mla.nope_dim + mla.rope_dim)
    q, q_rotated = jnp.split(q, (mla.nope_dim,), axis=-1)
    k_rotated = k_rotated[:, None]
    if mla.interleaved:
        q_rotated, k_rotated = rope.halves(q_rotated), rope.halves(k_rotated)
    q_rotated, k_rotated = (rope.rotate(each, *rotations) for each in (q_rotated, k_rotated))

    latent = layers.rms_norm(kv_latent, p["kv_norm"], _EPS)
    k = jnp.concatenate([latent[:, None], k_rotated], axis=-1)
    absorbed = jnp.concatenate([_of_heads("thd,hdr->thr", q, p["keys"]), q_rotated], axis=-1)

    def new(tokens: slice) -> tuple[jax.Array, jax.Array, jax.Array]:
        keys = _of_heads("tr,hdr->thd", latent[tokens], p["keys"])
        rotated = jnp.broadcast_to(k_rotated[tokens], (*keys.shape[:2], mla.rope_dim))
        return (
            jnp.concatenate([q[tokens], q_rotated[tokens]], axis=-1),
            jnp.concatenate([keys, rotated], axis=-1),
            _of_heads("tr,hdr->thd", latent[tokens], p["values"]),
        )

    values = functools.partial(_of_heads, "thr,hdr->thd", weight=p["values"])
    if (attend_uncompressed := _uncompressed.get()) is not None:
        attended = attend_uncompressed(absorbed, k, OfHeads(new, values), window=kind.window)
    else:
        attended = values(attention(absorbed, k, latent[:, None], window=kind.window))
    return attended.reshape(len(attended), -1)


def _of_heads(
    product: str, x: jax.Array, weight: jax.Array, dtype: jnp.dtype | None = None
) -> jax.Array:
    """x [tokens, heads, features], or [tokens, features] of all heads, times each head's part of
    `weight` [kv_heads, queries, dim, kv_rank]; of `dtype`, by default that of x."""
    weight = weight.reshape(-1, *weight.shape[2:])
    whole = jnp.einsum(product, x, weight, preferred_element_type=jnp.float32)
    return whole.astype(dtype or x.dtype)
