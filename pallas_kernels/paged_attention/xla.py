"""Paged attention in plain XLA: the fast path on CPUs, the fallback everywhere.

Both halves walk a row's context in blocks of whole pages, carry the running maximum, sum and
weighted values of the online softmax (1805.02867), and stop at the longest context present, so the
cost follows what is there and not what could be. Blocks always begin at multiples of the same
size, and a block beyond a row's context changes nothing to the last bit: a row's result does not
depend on its neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.api import KVPages, RaggedBatch

# Rows attended to together. Callers who sort decodes by context length waste less in each group.
DECODE_GROUP = 8
# Context tokens in a decode block, query and context tokens in a prefill block: chosen by
# `benchmarks/attention_cpu.py`.
DECODE_BLOCK = 64
PREFILL_QUERIES = 128
PREFILL_BLOCK = 256

_MASKED = -1e30


def write_kv(pages: KVPages, k, v, page_ids, offsets):
    keys = pages.k.at[page_ids, :, :, offsets].set(k.astype(pages.k.dtype), mode="drop")
    values = pages.v.at[page_ids, :, offsets, :].set(v.astype(pages.v.dtype), mode="drop")
    return keys, values


def paged_attention(q, pages: KVPages, batch: RaggedBatch, num_decodes, scale, window):
    tokens, heads, dim = q.shape
    kv_heads = pages.k.shape[1]
    q = (q * scale).reshape(tokens, kv_heads, heads // kv_heads, dim)
    outs, lses = [], []
    if num_decodes:
        tables, context = batch.tables[:num_decodes], batch.context[:num_decodes]
        out, lse = _decode(q[:num_decodes], pages, tables, context, window)
        outs.append(out)
        lses.append(lse)
    if tokens > num_decodes:
        rest = type(batch)(*(field[num_decodes:] for field in batch))
        rest = rest._replace(starts=rest.starts - num_decodes)
        out, lse = _prefill(q[num_decodes:], pages, rest, window)
        outs.append(out)
        lses.append(lse)
    out, lse = jnp.concatenate(outs), jnp.concatenate(lses)
    return out.reshape(tokens, heads, dim), lse.reshape(tokens, heads)


def _decode(q, pages: KVPages, tables, context, window):
    """One token a row: q [rows, kv_heads, group, dim], tables [rows, max_pages].

    Rows are taken a few at a time, and each few as far as the longest of them.
    """
    rows, page_size = q.shape[0], pages.k.shape[-1]
    together = min(DECODE_GROUP, rows)
    per_block = max(1, DECODE_BLOCK // page_size)
    tables = _pad(_pad(tables, 1, per_block), 0, together)
    context, padded = _pad(context, 0, together), _pad(q, 0, together)
    span = per_block * page_size

    def few(index, outputs):
        first = index * together
        q_few = lax.dynamic_slice_in_dim(padded, first, together)
        table = lax.dynamic_slice_in_dim(tables, first, together)
        until = lax.dynamic_slice_in_dim(context, first, together)
        since = jnp.zeros_like(until) if window is None else jnp.maximum(until - window, 0)

        def block(index, carry):
            ids = lax.dynamic_slice_in_dim(table, index * per_block, per_block, axis=1)
            k = pages.k.at[ids].get(mode="clip").astype(q.dtype)
            v = pages.v.at[ids].get(mode="clip").astype(q.dtype)
            scores = jnp.einsum("rhgd,rnhds->rnhgs", q_few, k, preferred_element_type=jnp.float32)
            position = index * span + jnp.arange(span).reshape(1, per_block, page_size)
            seen = (position >= since[:, None, None]) & (position < until[:, None, None])
            scores = jnp.where(seen[:, :, None, None, :], scores, _MASKED)
            return _online_softmax(carry, scores, (1, 4), "rnhgs,rnhsd->rhgd", v)

        begin = jnp.min(jnp.where(until > 0, since, jnp.max(until))) // span
        end = (jnp.max(until) + span - 1) // span
        carry = lax.fori_loop(begin, end, block, _empty_softmax(q_few.shape))
        results = _finish(carry, (until > 0)[:, None, None], q.dtype)
        return tuple(
            lax.dynamic_update_slice_in_dim(all_rows, result, first, 0)
            for all_rows, result in zip(outputs, results)
        )

    outputs = _empty_outputs(padded)
    out, lse = lax.fori_loop(0, padded.shape[0] // together, few, outputs)
    return out[:rows], lse[:rows]


def _prefill(q, pages: KVPages, batch: RaggedBatch, window):
    """Chunks of several tokens: q [tokens, kv_heads, group, dim], starts relative to them.

    One work item is PREFILL_QUERIES consecutive tokens of one row. The last item of a row runs
    over into its successor's tokens; items are written in order, so the successor corrects them.
    """
    tokens, kv_heads, group, dim = q.shape
    page_size = pages.k.shape[-1]
    queries = min(PREFILL_QUERIES, tokens)
    per_block = max(1, PREFILL_BLOCK // page_size)
    tables = _pad(batch.tables, 1, per_block)
    span = per_block * page_size
    padded = jnp.concatenate([q, jnp.zeros((queries, *q.shape[1:]), q.dtype)])
    items_of_row = (batch.lengths + queries - 1) // queries
    items_up_to = jnp.cumsum(items_of_row)

    def item(index, outputs):
        row = jnp.searchsorted(items_up_to, index, side="right", method="compare_all")
        offset = (index - (items_up_to[row] - items_of_row[row])) * queries
        start = batch.starts[row] + offset
        position = batch.context[row] - batch.lengths[row] + offset
        table = tables[row]
        q_item = lax.dynamic_slice_in_dim(padded, start, queries)
        q_item = q_item.transpose(1, 2, 0, 3).reshape(kv_heads, group * queries, dim)
        last_seen = position + jnp.tile(jnp.arange(queries), group)[:, None]

        def block(index, carry):
            ids = lax.dynamic_slice_in_dim(table, index * per_block, per_block)
            k = pages.k.at[ids].get(mode="clip").astype(q.dtype)
            v = pages.v.at[ids].get(mode="clip").astype(q.dtype)
            k = k.transpose(1, 2, 0, 3).reshape(kv_heads, dim, span)
            v = v.transpose(1, 0, 2, 3).reshape(kv_heads, span, dim)
            scores = jnp.einsum("hqd,hds->hqs", q_item, k, preferred_element_type=jnp.float32)
            seen_at = (index * span + jnp.arange(span))[None]
            seen = seen_at <= last_seen
            if window is not None:
                seen &= seen_at > last_seen - window
            scores = jnp.where(seen[None], scores, _MASKED)
            return _online_softmax(carry, scores, (2,), "hqs,hsd->hqd", v)

        begin = 0 if window is None else jnp.maximum(position - window + 1, 0) // span
        end = (jnp.minimum(batch.context[row], position + queries) + span - 1) // span
        carry = lax.fori_loop(begin, end, block, _empty_softmax(q_item.shape))
        out, lse = _finish(carry, True, q.dtype)
        out = out.reshape(kv_heads, group, queries, dim).transpose(2, 0, 1, 3)
        lse = lse.reshape(kv_heads, group, queries).transpose(2, 0, 1)
        return (
            lax.dynamic_update_slice_in_dim(outputs[0], out, start, 0),
            lax.dynamic_update_slice_in_dim(outputs[1], lse, start, 0),
        )

    out, lse = lax.fori_loop(0, items_up_to[-1], item, _empty_outputs(padded))
    owned = jnp.arange(tokens) < jnp.max(batch.starts + batch.lengths)
    out = jnp.where(owned[:, None, None, None], out[:tokens], 0)
    return out, jnp.where(owned[:, None, None], lse[:tokens], -jnp.inf)


def _empty_softmax(shape):
    """Running maximum, sum and weighted values before any block; shape [..., dim]."""
    return (
        jnp.full(shape[:-1], _MASKED, jnp.float32),
        jnp.zeros(shape[:-1], jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def _online_softmax(carry, scores, axes, product, v):
    """Fold a block of scores, whose context lies along `axes`, into the running softmax.

    `product` is the einsum of weights and values `v`.
    """
    peak, total, values = carry
    new_peak = jnp.maximum(peak, jnp.max(scores, axes))
    weights = jnp.exp(scores - jnp.expand_dims(new_peak, axes))
    shrink = jnp.exp(peak - new_peak)
    total = total * shrink + jnp.sum(weights, axes)
    added = jnp.einsum(product, weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return new_peak, total, values * shrink[..., None] + added


def _finish(carry, present, dtype):
    """Normalise; where nothing was `present`, out = 0 and lse = -inf."""
    peak, total, values = carry
    out = jnp.where(jnp.expand_dims(present, -1), values / total[..., None], 0).astype(dtype)
    return out, jnp.where(present, peak + jnp.log(total), -jnp.inf)


def _empty_outputs(q):
    """out = 0 and lse = -inf for every token of q [tokens, kv_heads, group, dim]."""
    return jnp.zeros(q.shape, q.dtype), jnp.full(q.shape[:3], -jnp.inf, jnp.float32)


def _pad(array, axis, multiple):
    """Zeros appended along `axis` up to a multiple of `multiple`."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % multiple)
    return jnp.pad(array, widths)
