"""Paged attention in plain XLA: the fast path on CPUs, the fallback everywhere.

Decode and prefill both walk a row's context in blocks of whole pages, carry the running maximum,
sum and weighted values of the online softmax (1805.02867), and stop at the longest context present,
so the cost follows actual and not maximum lengths. Blocks always begin at multiples of the same
size, and a block beyond a row's context leaves its result bit-identical: a row's result does not
depend on its neighbours.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import as_bits, ceil_div
from pallas_kernels.paged_attention.layout import (
    QUANTIZED,
    KVPages,
    LatentPages,
    Pages,
    Paths,
    RaggedBatch,
    Visible,
    packed_int4,
)
from pallas_kernels.paged_attention.xla_gather import (
    block_of_pages,
    gathered_pages,
    keys_and_values,
    on_paths,
)
from pallas_kernels.platforms import by_platform

# Rows per group. Sorting decodes by context length reduces waste within each group.
DECODE_GROUP = 8
# Query tokens and context tokens of a prefill block (docs/decisions/003-attention-on-cpu.md).
PREFILL_QUERIES = 128
PREFILL_BLOCK = 256

MASKED = -1e30
_MIN_PEAK = 1e-30
"""Of a token's values in a head: its scale is not 0, nor too small to divide by."""


def write_kv(pages: Pages, k, v, page_ids, offsets):
    # XLA on CPUs computes these in other dtypes, and converts the whole pool to them and back.
    by_token = pages.k.dtype.name in ("bfloat16", "float8_e4m3fn")
    return by_platform(
        pages,
        k,
        v,
        page_ids,
        offsets,
        cpu=_write_by_token if by_token else _write_together,
        default=_write_together,
    )


def _write_together(pages: Pages, k, v, page_ids, offsets):
    page_ids = jnp.where(page_ids >= 0, page_ids, len(pages.k))  # negative ids count from the end
    keys = pages.k.at[page_ids, :, :, offsets].set(k, mode="drop")
    if isinstance(pages, LatentPages):
        return dataclasses.replace(pages, k=keys)
    values = pages.v.at[page_ids, :, offsets, :].set(v, mode="drop")
    return KVPages(keys, values)


def _write_by_token(pages: Pages, k, v, page_ids, offsets):
    """In place and bit-exact: only the slices that are written are reinterpreted as integers."""
    num_pages = pages.k.shape[0]
    k, v = jax.tree.map(as_bits, (k, v))  # of latents v is None
    places = jnp.stack([page_ids, offsets], axis=1)

    def write(token, pages):
        page, offset = places[token]

        def put(pages):
            key, start = k[token, None, :, :, None], (page, 0, 0, offset)
            if isinstance(pages, LatentPages):
                return dataclasses.replace(pages, k=_updated(pages.k, key, start))
            parts = key, v[token, None, :, None, :]
            starts = start, (page, 0, offset, 0)
            return KVPages(*map(_updated, pages, parts, starts))

        inside = (page >= 0) & (page < num_pages)
        return lax.cond(inside, put, lambda pages: pages, pages)

    return lax.fori_loop(0, len(page_ids), write, pages)


def _updated(array, part, start):
    updated = lax.dynamic_update_slice(as_bits(array), part, start, allow_negative_indices=False)
    return lax.bitcast_convert_type(updated, array.dtype)


def write_scales(scales, new, page_ids, offsets):
    """scales [pages, kv_heads, 2, page_size] with `new` [tokens, kv_heads, 2] written."""
    page_ids = jnp.where(page_ids >= 0, page_ids, len(scales))  # negative ids count from the end
    return scales.at[page_ids, :, :, offsets].set(new, mode="drop")


def scales_of(values, dtype):
    """The scale of each token and head of values [tokens, kv_heads, head_dim], with which the
    largest becomes the largest of `dtype`: float32 [tokens, kv_heads]."""
    peak = jnp.max(jnp.abs(values.astype(jnp.float32)), axis=-1)
    return jnp.maximum(peak, _MIN_PEAK) / _largest(dtype)


def to_elements(values, scale, dtype):
    """values [tokens, kv_heads, head_dim] as elements of pages of `dtype`, half as many if that is
    uint8; scale [kv_heads] or [tokens, kv_heads]."""
    if dtype.name not in QUANTIZED:
        return values.astype(dtype)
    values = values.astype(jnp.float32)
    if scale is not None:
        values = values / scale[..., None]
    largest = _largest(dtype)
    if dtype != jnp.float8_e4m3fn:
        values = jnp.round(values)
    values = jnp.clip(values, -largest, largest)
    return packed_int4(values) if dtype == jnp.uint8 else values.astype(dtype)


def _largest(dtype):
    whole = {"int8": 127.0, "uint8": 7.0}
    return whole[dtype.name] if dtype.name in whole else float(jnp.finfo(dtype).max)


def paged_attention(
    q,
    pages: Pages,
    batch: RaggedBatch,
    visible: Visible,
    *,
    num_decodes,
    scale,
    soft_cap=None,
    out_dtype=None,
    paths: Paths | None = None,
):
    """As `api.attend`, with out of `out_dtype`, by default that of q.

    paths: of the first tokens, decodes or rows of one token, which attend as if their paths were
        where the page tables have them, to the last bit.
    """
    tokens, heads, dim = q.shape
    kv_heads = pages.k.shape[1]
    out_dtype = out_dtype or q.dtype
    if q.dtype == jnp.float32:  # fewer than scores; other dtypes would round again
        q, scale = q * scale, 1
    q = q.reshape(tokens, kv_heads, heads // kv_heads, dim)
    to_scores = functools.partial(scores_of, scale=scale, soft_cap=soft_cap)
    outs, lses = [], []
    if num_decodes:
        few = Visible(*(limit[:num_decodes] for limit in visible))
        tables = batch.tables[:num_decodes]
        own = jax.tree.map(lambda array: array[:num_decodes], paths)
        out, lse = _decode(q[:num_decodes], pages, tables, few, own, to_scores, out_dtype)
        outs.append(out)
        lses.append(lse)
    if tokens > num_decodes:
        rest = batch.after_decodes(num_decodes)
        many = Visible(*(limit[num_decodes:] for limit in visible))
        own = None
        if paths is not None and len(paths.first) > num_decodes:
            own = jax.tree.map(lambda array: array[num_decodes:], paths)
        out, lse = _prefill(q[num_decodes:], pages, rest, many, own, to_scores, out_dtype)
        outs.append(out)
        lses.append(lse)
    out, lse = jnp.concatenate(outs), jnp.concatenate(lses)
    return out.reshape(tokens, heads, pages.value_dim), lse.reshape(tokens, heads)


def _decode(q, pages: Pages, tables, visible: Visible, paths: Paths | None, to_scores, out_dtype):
    """One token per row: q [rows, kv_heads, group, dim], tables [rows, max_pages].

    Rows are processed in groups, page by page, each group up to its longest context.
    """
    rows, page_size = q.shape[0], pages.k.shape[-1]
    together = min(DECODE_GROUP, rows)
    tables, padded, since, until = (
        padded_to(array, 0, together) for array in (tables, q, visible.since, visible.until)
    )
    sees = until > since
    first_page = jnp.where(sees, lax.div(since, page_size), tables.shape[1])
    after_page = jnp.where(sees, ceil_div(until, page_size), 0)
    begins = jnp.min(first_page.reshape(-1, together), axis=1)
    ends = jnp.max(after_page.reshape(-1, together), axis=1)
    if paths is not None:
        paths = Paths(*(padded_to(array, 0, together) for array in paths))

    def few(index, outputs):
        first = index * together
        q_few, table, since_few, until_few = (
            lax.dynamic_slice_in_dim(array, first, together)
            for array in (padded, tables, since, until)
        )

        if paths is not None:
            own = Paths(*(lax.dynamic_slice_in_dim(array, first, together) for array in paths))

        def block(page, carry):
            ids = lax.dynamic_index_in_dim(table, page, axis=1, keepdims=False)
            position = page * page_size + jnp.arange(page_size)[None]
            if paths is not None:
                seen_until = until_few > page * page_size
                ids = on_paths(ids, position, own, seen_until)
            k, v = keys_and_values(pages, ids, page, q.dtype)
            products = jnp.einsum("rhgd,rhds->rhgs", q_few, k, preferred_element_type=jnp.float32)
            seen = (position >= since_few[:, None]) & (position < until_few[:, None])
            v_scale = None
            if pages.scales is not None:
                scales = gathered_pages(pages.scales, ids, 3)
                k_scale, v_scale = scales[:, :, :1], scales[:, :, 1:]
                products *= k_scale
                v_scale = jnp.where(seen[:, None, None], v_scale, 0)
                if q.dtype == jnp.float16:  # has no room for the products of weights and scales
                    v, v_scale = (v * v_scale.swapaxes(2, 3)).astype(q.dtype), None
            scores = jnp.where(seen[:, None, None], to_scores(products), MASKED)
            v = jnp.where(seen[:, None, :, None], v, 0)  # unseen values may be NaN
            return online_softmax(carry, scores, "rhgs,rhsd->rhgd", v, v_scale)

        empty = empty_softmax((*q_few.shape[:-1], pages.value_dim))
        carry = lax.fori_loop(begins[index], ends[index], block, empty)
        results = finish(carry, (until_few > since_few)[:, None, None], out_dtype)
        return _write_back(outputs, results, first)

    groups = padded.shape[0] // together
    outputs = _empty_outputs(padded, pages.value_dim, out_dtype)
    out, lse = lax.fori_loop(0, groups, few, outputs)
    return out[:rows], lse[:rows]


def _prefill(
    q,
    pages: Pages,
    batch: RaggedBatch,
    visible: Visible,
    paths: Paths | None,
    to_scores,
    out_dtype,
):
    """Chunks of several tokens: q [tokens, kv_heads, group, dim], starts relative to them.

    One work item is PREFILL_QUERIES consecutive tokens of one row. The last item of a row overlaps
    the next row's tokens; items are written in order, so the next row overwrites them.
    """
    (tokens, kv_heads, group, dim), value_dim = q.shape, pages.value_dim
    queries = min(PREFILL_QUERIES, tokens)
    per_block = max(1, PREFILL_BLOCK // pages.k.shape[-1])
    span = per_block * pages.k.shape[-1]
    tables = padded_to(batch.tables, 1, per_block)
    padded = jnp.concatenate([q, jnp.zeros((queries, *q.shape[1:]), q.dtype)])
    since, until = (jnp.pad(limit, (0, queries)) for limit in visible)

    # Row, tokens and blocks of every item, up to the maximum number of items.
    items_of_row = ceil_div(batch.lengths, queries)
    items_up_to = jnp.cumsum(items_of_row)
    item = jnp.arange(tokens // queries + batch.lengths.shape[0])
    rows = jnp.sum(item[:, None] >= items_up_to[None], axis=1)
    rows = jnp.minimum(rows, batch.lengths.shape[0] - 1)
    offsets = (item - (items_up_to - items_of_row)[rows]) * queries
    starts = batch.starts[rows] + offsets
    # Limits never decrease along a row: its first token has the least, its last the greatest.
    firsts = since[starts]
    lasts = until[jnp.minimum(starts + queries, batch.starts[rows] + batch.lengths[rows]) - 1]
    begins, ends = lax.div(firsts, span), ceil_div(lasts, span)

    def attend(index, outputs):
        start, table = starts[index], tables[rows[index]]
        q_item, since_item, until_item = (
            lax.dynamic_slice_in_dim(array, start, queries) for array in (padded, since, until)
        )
        q_item = q_item.transpose(1, 2, 0, 3).reshape(kv_heads, group * queries, dim)
        since_item, until_item = (
            jnp.tile(limit, group)[:, None] for limit in (since_item, until_item)
        )

        if paths is not None:
            own = Paths(*(jnp.repeat(array[start][None], per_block, axis=0) for array in paths))

        def block(block_index, carry):
            ids = lax.dynamic_slice_in_dim(table, block_index * per_block, per_block)
            position = block_index * span + jnp.arange(span)[None]
            if paths is not None:
                ids = on_paths(ids, position.reshape(per_block, -1), own, True)
            k, v = block_of_pages(pages, ids, block_index, q.dtype)
            products = jnp.einsum("hqd,hds->hqs", q_item, k, preferred_element_type=jnp.float32)
            inside = (position >= firsts[index]) & (position < lasts[index])
            v = jnp.where(inside[..., None], v, 0)  # unseen values may be NaN
            seen = (position >= since_item) & (position < until_item)
            scores = jnp.where(seen[None], to_scores(products), MASKED)
            return online_softmax(carry, scores, "hqs,hsd->hqd", v)

        empty = empty_softmax((*q_item.shape[:-1], value_dim))
        carry = lax.fori_loop(begins[index], ends[index], block, empty)
        out, lse = finish(carry, True, out_dtype)
        out = out.reshape(kv_heads, group, queries, value_dim).transpose(2, 0, 1, 3)
        lse = lse.reshape(kv_heads, group, queries).transpose(2, 0, 1)
        return _write_back(outputs, (out, lse), start)

    outputs = _empty_outputs(padded, value_dim, out_dtype)
    out, lse = lax.fori_loop(0, items_up_to[-1], attend, outputs)
    sees = visible.until > visible.since
    out = jnp.where(sees[:, None, None, None], out[:tokens], 0)
    return out, jnp.where(sees[:, None, None], lse[:tokens], -jnp.inf)


def scores_of(products, scale, soft_cap):
    scores = products * scale
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def empty_softmax(shape):
    """Running maximum, sum and weighted values before any block; shape [..., dim]."""
    return (
        jnp.full(shape[:-1], MASKED, jnp.float32),
        jnp.zeros(shape[:-1], jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )


def online_softmax(carry, scores, product, v, v_scale=None):
    """Fold a block of scores [..., context] into the running softmax.

    `product` is the einsum of weights and values: `v`, times v_scale [..., context] if not None.
    """
    peak, total, values = carry
    new_peak = jnp.maximum(peak, jnp.max(scores, -1))
    weights = jnp.exp(scores - new_peak[..., None])
    shrink = jnp.exp(peak - new_peak)
    total = total * shrink + jnp.sum(weights, -1)
    if v_scale is not None:
        weights *= v_scale
    added = jnp.einsum(product, weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return new_peak, total, values * shrink[..., None] + added


def finish(carry, present, dtype):
    """Normalise; out = 0 and lse = -inf where not `present`."""
    peak, total, values = carry
    out = jnp.where(jnp.expand_dims(present, -1), values / total[..., None], 0).astype(dtype)
    return out, jnp.where(present, peak + jnp.log(total), -jnp.inf)


def _empty_outputs(q, value_dim, dtype):
    """out = 0 and lse = -inf for every token of q [tokens, kv_heads, group, dim]."""
    out = jnp.zeros((*q.shape[:3], value_dim), dtype)
    return out, jnp.full(q.shape[:3], -jnp.inf, jnp.float32)


def _write_back(outputs, results, first):
    """Put each result's rows into its output, from row `first` on."""
    return tuple(
        lax.dynamic_update_slice_in_dim(output, result, first, 0)
        for output, result in zip(outputs, results)
    )


def padded_to(array, axis, multiple):
    """Zeros appended along `axis` up to a multiple of `multiple`."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, -array.shape[axis] % multiple)
    return jnp.pad(array, widths)
