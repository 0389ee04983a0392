"""Attention of decodes to some tokens on the host (SparF of InstInfer, 2409.04992, which is SparQ,
2312.04985, in storage).

The features in which a query is largest tell most of its scores. By these features of all keys a
decode estimates the weight of each token. It attends to the tokens of the largest weights exactly,
and takes the mean value of all tokens for the weight of the others.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.core.model_config import ModelConfig
from jaxserve.runtime.planning.sparf import SparFSizes
from pallas_kernels.arrays import ceil_div
from pallas_kernels.paged_attention import Pages


def attend_to_some(
    config: ModelConfig,
    sizes: SparFSizes,
    q: jax.Array,
    pages: Pages,
    tables: jax.Array,
    context: jax.Array,
    means: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Attention of q [rows, heads, head_dim] to the first `context` int32 [rows] tokens of `tables`
    int32 [rows, max pages]; `means` float32 [rows, kv_heads, head_dim] are their mean values.

    The queries of a KV head share the features and the tokens, those of the largest sums; of equal
    ones the first. Returns out float32 and lse, the estimated log-sum-exp of all scores: that of
    the selected tokens, divided by their share.
    """
    rows, heads, dim = q.shape
    kv_heads, page_size = pages.k.shape[1], pages.k.shape[3]
    head = jnp.arange(kv_heads)[:, None]
    q = q.reshape(rows, kv_heads, -1, dim).astype(jnp.float32)
    _, largest = lax.top_k(jnp.abs(q).sum(axis=2), sizes.components)
    parts = jnp.take_along_axis(q, largest[:, :, None], axis=3)
    # Scores of some features vary less than those of all.
    share = jnp.abs(parts).sum(-1) / jnp.maximum(jnp.abs(q).sum(-1), 1e-30)
    parts *= (config.attention_scale / jnp.sqrt(jnp.maximum(share, 1e-30)))[..., None]
    width = tables.shape[1] * page_size

    def of_page(index, scores):
        ids = lax.dynamic_index_in_dim(tables, index, axis=1)
        keys = pages.k[ids[:, :, None], head, largest].astype(jnp.float32)
        found = jnp.einsum("rhgc,rhcs->rhgs", parts, keys)
        return lax.dynamic_update_slice_in_dim(scores, found, index * page_size, axis=3)

    empty = jnp.zeros((*q.shape[:3], width), jnp.float32)
    estimates = lax.fori_loop(0, ceil_div(jnp.max(context), page_size), of_page, empty)
    seen = jnp.arange(width) < context[:, None]
    weights = masked_softmax(_capped(config, estimates), seen[:, None, None])
    ranks = jnp.where(seen[:, None], weights.sum(axis=2), -1.0)
    best, tokens = lax.top_k(ranks, sizes.selected)
    selected = (best >= 0)[:, :, None]
    share = jnp.take_along_axis(weights, tokens[:, :, None], axis=3)
    share = jnp.where(selected, share, 0).sum(-1)

    ids = jnp.take_along_axis(tables[:, None], tokens // page_size, axis=2)
    keys = pages.k[ids, head, :, tokens % page_size].astype(jnp.float32)
    values = pages.v[ids, head, tokens % page_size].astype(jnp.float32)
    scores = jnp.einsum("rhgd,rhnd->rhgn", q, keys) * config.attention_scale
    scores = jnp.where(selected, _capped(config, scores), -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    exact = jnp.where(
        selected, jnp.exp(scores - jnp.where(jnp.isfinite(lse), lse, 0)[..., None]), 0
    )
    values = jnp.where(selected.swapaxes(2, 3), values, 0)  # Those of no token may be no numbers.
    out = jnp.einsum("rhgn,rhnd->rhgd", exact, values)
    out = share[..., None] * out + (1 - share[..., None]) * means[:, :, None]
    present = (context > 0)[:, None, None]
    out = jnp.where(present[..., None], out, 0)
    lse = jnp.where(present, lse - jnp.log(jnp.maximum(share, 1e-30)), -jnp.inf)
    return out.reshape(rows, heads, dim), lse.reshape(rows, heads)


def _capped(config: ModelConfig, scores: jax.Array) -> jax.Array:
    cap = config.attention_soft_cap
    return scores if cap is None else cap * jnp.tanh(scores / cap)


def masked_softmax(scores: jax.Array, seen: jax.Array) -> jax.Array:
    """Softmax of `scores` [..., n] over what is `seen`; zeros if that is nothing."""
    highest = jnp.where(seen, scores, -jnp.inf).max(axis=-1, keepdims=True)
    weights = jnp.where(seen, jnp.exp(scores - jnp.where(jnp.isfinite(highest), highest, 0)), 0)
    return weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
