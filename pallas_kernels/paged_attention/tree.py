"""Attention of a speculation tree's tokens to each other (SpecInfer, 2305.09781).

A tree has a few dozen tokens, so all their mutual scores are one small dense product. Attention to
the committed context is that of a prefill chunk, and the two parts merge by log-sum-exp: kernels
need no support for trees.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.layout import (
    LatentPages,
    Pages,
    RaggedBatch,
    as_keys,
    unpacked_int4,
)
from pallas_kernels.paged_attention.masks import depths, is_tree, owners

_MASKED = -1e30


def attend_within_trees(
    q: jax.Array,
    pages: Pages,
    batch: RaggedBatch,
    tree_mask: jax.Array,
    *,
    num_decodes: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Partial attention of every tree's tokens to its own tokens; empty for all other tokens.

    Arguments as in `api.paged_attention`. Returns out and lse, both float32.
    """
    tokens, page_size = len(q), pages.k.shape[3]
    trees = jax.tree.map(lambda field: field[num_decodes:], batch)
    width = tree_mask.shape[1]
    place = jnp.arange(width)
    present = (place < trees.lengths[:, None]) & is_tree(batch, num_decodes, tree_mask)[
        num_decodes:, None
    ]

    token = jnp.clip(trees.starts[:, None] + place, 0, tokens - 1)
    queries = as_keys(q[token], pages)
    position = (trees.context - trees.lengths)[:, None] + place
    position = jnp.where(present, position, 0)
    page = jnp.take_along_axis(trees.tables, position // page_size, axis=1)
    page = jnp.clip(page, 0, len(pages.k) - 1)
    # Indices around slices: [trees, width, kv_heads, head_dim] of both.
    k = pages.k[page, :, :, position % page_size]
    v = None if isinstance(pages, LatentPages) else pages.v[page, :, position % page_size]
    if k.dtype == jnp.uint8:
        k, v = unpacked_int4(k, -1), unpacked_int4(v, -1)
    k = k.astype(q.dtype)
    v = k[..., : pages.value_dim] if v is None else v.astype(q.dtype)
    if pages.scales is not None:
        scales = pages.scales[page, :, :, position % page_size, None]
        k, v = (k * scales[..., 0, :]).astype(q.dtype), (v * scales[..., 1, :]).astype(q.dtype)
    v = jnp.where(present[..., None, None], v, 0)  # absent values may be NaN

    mask = tree_mask[token] & present[:, :, None] & present[:, None, :]
    if window is not None:
        depth = depths(tree_mask)[token]
        mask &= depth[:, :, None] - depth[:, None, :] < window
    out, lse = attend_densely(queries, k, v, mask, scale=scale, soft_cap=soft_cap)
    out = as_keys(out, pages)

    row, index, owned = owners(batch, tokens)
    tree, index = jnp.maximum(row - num_decodes, 0), jnp.clip(index, 0, width - 1)
    seen = jnp.any(mask, axis=-1)[tree, index] & owned & (row >= num_decodes)
    out = out[tree, index]
    lse = lse[tree, index]
    out = lax.select(jnp.broadcast_to(seen[:, None, None], out.shape), out, jnp.zeros_like(out))
    return out, jnp.where(seen[:, None], lse, -jnp.inf)


def attend_densely(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    *,
    scale: float,
    soft_cap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Partial attention of q [rows, queries, heads, dim] to k, v [rows, keys, kv_heads, dim], of
    those in `mask` bool [rows, queries, keys].

    Returns out float32 [rows, queries, heads, dim] and lse float32 [rows, queries, heads], neither
    of any meaning for a query that sees no key.
    """
    rows, width, heads, dim = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(rows, width, kv_heads, heads // kv_heads, dim)
    scores = jnp.einsum("rqhgd,rkhd->rhgqk", q, k, preferred_element_type=jnp.float32)
    scores *= scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(mask[:, None, None], scores, _MASKED)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / total).astype(v.dtype)
    out = jnp.einsum("rhgqk,rkhd->rqhgd", weights, v, preferred_element_type=jnp.float32)
    lse = jnp.moveaxis((peak + jnp.log(total))[..., 0], 3, 1)
    return out.reshape(rows, width, heads, -1), lse.reshape(rows, width, heads)
