"""Attention of groups of tokens to the same pages in plain XLA: each page is read once a group.

A block of the shared pages is gathered and put in order once, and all queries of the group meet it,
a tile of tokens at a time, each tile as one matrix product a KV head (the shared part of Hydragen,
2402.05099, and of cascade inference, 2501.01005).
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import ceil_div
from pallas_kernels.paged_attention import xla
from pallas_kernels.paged_attention.layout import Pages, RaggedBatch, Visible
from pallas_kernels.paged_attention.xla_gather import block_of_pages

PREFIX_QUERIES = 8
"""Tokens of a tile: a product computes all of them, whether the group has as many or not."""


def attend(q, pages: Pages, batch: RaggedBatch, visible: Visible, *, scale, soft_cap=None):
    """As `api.attend`, of rows without decodes whose tokens see their row's positions from 0 on.
    Rows of no tokens come last."""
    tokens, heads, dim = q.shape
    kv_heads, page_size = pages.k.shape[1], pages.k.shape[3]
    group, tile = heads // kv_heads, min(PREFIX_QUERIES, tokens)
    per_block = max(1, xla.PREFILL_BLOCK // page_size)
    span = per_block * page_size
    tables = xla.padded_to(batch.tables, 1, per_block)
    if q.dtype == jnp.float32:  # fewer than scores; other dtypes would round again
        q, scale = q * scale, 1
    # The queries of a KV head and its tokens: [kv_heads, tokens, group, dim], some tiles longer.
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0))).reshape(-1, kv_heads, group, dim)
    padded = padded.swapaxes(0, 1)
    until = jnp.pad(visible.until, (0, tile))

    def attend_group(row, carry):
        start, end, table = batch.starts[row], batch.starts[row] + batch.lengths[row], tables[row]
        last = jnp.max(jnp.where(_within(jnp.arange(tokens), start, end), until[:tokens], 0))

        def attend_block(block, carry):
            ids = lax.dynamic_slice_in_dim(table, block * per_block, per_block)
            k, v = block_of_pages(pages, ids, block, q.dtype)
            position = block * span + jnp.arange(span)
            v = jnp.where((position < last)[:, None], v, 0)  # unseen values may be NaN

            def attend_tile(index, carry):
                first = start + index * tile
                before = tuple(lax.dynamic_slice_in_dim(x, first, tile, 1) for x in carry)
                q_tile = lax.dynamic_slice_in_dim(padded, first, tile, 1)
                until_tile = lax.dynamic_slice_in_dim(until, first, tile)
                products = jnp.einsum(
                    "hqd,hds->hqs",
                    q_tile.reshape(kv_heads, tile * group, dim),
                    k,
                    preferred_element_type=jnp.float32,
                )
                scores = xla.scores_of(products, scale, soft_cap)
                seen = position < jnp.repeat(until_tile, group)[:, None]
                scores = jnp.where(seen, scores, xla.MASKED)
                flat = tuple(x.reshape(kv_heads, tile * group, *x.shape[3:]) for x in before)
                after = xla.online_softmax(flat, scores, "hqs,hsd->hqd", v)
                own = _within(first + jnp.arange(tile), start, end)  # the rest are of other rows
                return tuple(
                    lax.dynamic_update_slice_in_dim(
                        whole,
                        jnp.where(_like(own, old), new.reshape(old.shape), old),
                        first,
                        1,
                    )
                    for whole, old, new in zip(carry, before, after)
                )

            return lax.fori_loop(0, ceil_div(batch.lengths[row], tile), attend_tile, carry)

        return lax.fori_loop(0, ceil_div(last, span), attend_block, carry)

    empty = xla.empty_softmax((*padded.shape[:3], pages.value_dim))
    carry = lax.fori_loop(0, jnp.sum(batch.lengths > 0), attend_group, empty)
    present = jnp.pad(visible.until > 0, (0, tile))[None, :, None]
    out, lse = xla.finish(carry, present, jnp.float32)
    out, lse = out.swapaxes(0, 1)[:tokens], lse.swapaxes(0, 1)[:tokens]
    return out.reshape(tokens, heads, pages.value_dim), lse.reshape(tokens, heads)


def _within(index, start, end):
    return (index >= start) & (index < end)


def _like(own, array):
    """`own` [tile], to select from an array [kv_heads, tile, ...]."""
    return own.reshape(1, -1, *[1] * (array.ndim - 2))
