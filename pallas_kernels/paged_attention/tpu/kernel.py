"""The TPU kernel: tiles of queries attend to blocks of pages, with copies overlapped.

A program walks a work list (`work`). A tile of queries stays in VMEM while its items are
processed, together with the state of its online softmax (1805.02867). Whole pages are copied, block
after block, into a ring of slots in VMEM. A copy cursor in the work list runs ahead of the
computation by as many blocks as the ring has spare slots, from item to item and row to row, so the
first pages of a row arrive while the previous rows are being computed.

For one KV head at a time, the queries that share it are the rows of two matrix products with a
block of keys [head_dim, span] and of values [span, head_dim]. Scales of quantized pages, [2, span],
multiply scores and weights. Blocks that every token of the tile sees in full are not masked. In the
others an invisible score is -1e30, and so is the initial peak: contributions of such scores are
multiplied by exp(-1e30 - peak) = 0 at the first visible score. A block that a token does not see
thus leaves its result bit-identical.

Scores run along lanes. The running peak is stored as `lanes` equal columns and the running total as
`lanes` partial sums, so no value is broadcast over lanes or summed across them before the end.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.arrays import ceil_div
from pallas_kernels.compat import tpu as compat
from pallas_kernels.paged_attention.tpu.work import Items

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.layout import KVPages

LANES = 128
"""Lanes of a vector register, and columns of a tile of any array in memory."""

QUERY_ROWS = 512
"""Target rows of the matrix products of a tile of queries, per KV head."""

DECODE_SPAN, CHUNK_SPAN = 2048, 512
"""Maximum positions of a block; for chunks with small pages also the minimum. Scores of a chunk's
block, QUERY_ROWS each, are 1 MiB per KV head."""

BLOCK_BYTES = 2 * 2**20
"""Target bytes of keys and values of a decode's block."""

RING_BYTES, MAX_SLOTS = 8 * 2**20, 8
"""Maximum bytes of a ring of more than two slots, and maximum number of slots."""

_TILE_ELEMENTS = QUERY_ROWS * 1024
_VMEM_BYTES = 48 * 2**20
_MASKED = -1e30
_LOG2E = math.log2(math.e)


class _Sizes(NamedTuple):
    """heads: KV heads per program, which a core processes in turn. pages, span: pages and positions
    of a block. slots: blocks that the ring holds. lanes: columns of the running state.
    """

    heads: int
    pages: int
    span: int
    slots: int
    lanes: int


def _sizes(q, pages, queries) -> _Sizes:
    """A row's blocks do not depend on the batch."""
    _, kv_heads, rows, dim = q.shape
    page_size, cores = pages.k.shape[3], compat.tpu_cores()
    share = kv_heads // cores if kv_heads % cores == 0 else kv_heads
    most = max(1, _TILE_ELEMENTS // (dim * max(rows, QUERY_ROWS)))
    heads = max(n for n in range(1, share + 1) if share % n == 0 and n <= most)
    position_bytes = heads * dim * (pages.k.dtype.itemsize + pages.v.dtype.itemsize)
    if pages.scales is not None:
        position_bytes += heads * 2 * pages.scales.dtype.itemsize
    span = CHUNK_SPAN
    if queries == 1:
        span = min(max(span, BLOCK_BYTES // position_bytes), DECODE_SPAN)
    of_block = max(1, span // page_size)
    span = of_block * page_size
    slots = min(max(2, RING_BYTES // (span * position_bytes)), MAX_SLOTS)
    return _Sizes(heads, of_block, span, slots, math.gcd(span, LANES))


def attend(
    q: jax.Array,
    limits: jax.Array,
    pages: KVPages,
    tables: jax.Array,
    items: Items,
    following: jax.Array,
    *,
    scale: float,
    soft_cap: float | None,
    out_dtype: jnp.dtype,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Attention of tiles of queries over the pages of the rows they belong to.

    q [tiles, kv_heads, group * queries, head_dim]: tokens of a tile run fastest.
    limits [tiles, queries, 2] int32: since and until of each token.
    tables [rows, max_pages] int32; items and following as returned by `work_list`.

    Returns out of `out_dtype`, shaped as q, and lse [tiles, kv_heads, 1, group * queries] float32.
    """
    tiles, kv_heads, rows, dim = q.shape
    num_pages, _, _, page_size = pages.k.shape
    num_items, max_pages = len(items.tile), tables.shape[1]
    queries = limits.shape[1]
    sizes = _sizes(q, pages, queries)
    heads, span, slots = sizes.heads, sizes.span, sizes.slots
    # One array, because each array is a copy to wait for. Its parts begin at multiples of a tile.
    stride = math.ceil(num_items / LANES) * LANES
    work = jnp.concatenate([jnp.pad(field, (0, stride - num_items)) for field in items])
    # The default layout of an array on a TPU does not pad its last dimension to all lanes if it can
    # pad less with another one last, so values of a small head_dim are stored like keys. Swapping
    # the dimensions declares this and moves no data.
    turned = dim < LANES
    v = pages.v.swapaxes(2, 3) if turned else pages.v
    pool = [pages.k, v] if pages.scales is None else [pages.k, v, pages.scales]
    rings = [(dim, span), (dim, span) if turned else (span, dim), (2, span)]
    rings = [pltpu.VMEM((slots, heads, *shape), array.dtype) for shape, array in zip(rings, pool)]

    def product(a, b, turned=False):
        return lax.dot_general(
            a,
            b,
            (((1,), (1 if turned else 0,)), ((), ())),
            precision=lax.Precision.HIGHEST if q.dtype == jnp.float32 else None,
            preferred_element_type=jnp.float32,
        )

    def kernel(work, following, tables, q, limits, *refs):
        pool, (out, lse), refs = refs[: len(rings)], refs[len(rings) :][:2], refs[len(rings) + 2 :]
        (k_ring, v_ring, *scale_ring), refs = refs[: len(rings)], refs[len(rings) :]
        arrived, peak, total, values, ahead, copied, used = refs
        items = Items(*(work.at[pl.ds(n * stride, stride)] for n in range(len(Items._fields))))
        own_heads = pl.ds(pl.program_id(0) * heads, heads)
        item = pl.program_id(1)

        def first_block(item):
            return lax.div(items.since[item], span)

        def for_each_page(item, block, slot, act):
            """Call `act` with the copies of a block's pages that have visible positions."""
            begin = jnp.maximum(block * sizes.pages, lax.div(items.since[item], page_size))
            end = jnp.minimum((block + 1) * sizes.pages, ceil_div(items.until[item], page_size))

            def one(index, _):
                entry = items.row[item] * max_pages + jnp.minimum(index, max_pages - 1)
                page = jnp.clip(tables[entry], 0, num_pages - 1)
                offset = pl.multiple_of((index - block * sizes.pages) * page_size, page_size)
                there = pl.ds(offset, page_size)
                values = v_ring.at[slot, :, :, there] if turned else v_ring.at[slot, :, there]
                scales = (ring.at[slot, :, :, there] for ring in scale_ring)
                targets = k_ring.at[slot, :, :, there], values, *scales
                for array, target in zip(pool, targets):
                    act(pltpu.make_async_copy(array.at[page, own_heads], target, arrived.at[slot]))

            lax.fori_loop(begin, end, one, None)

        def go_ahead_to(item):
            ahead[0] = item
            ahead[1] = first_block(jnp.minimum(item, num_items - 1))

        def copy_next():
            """Start the copies of the next block, if any."""
            item, block = ahead[0], ahead[1]

            @pl.when(item < num_items)
            def _():
                for_each_page(item, block, lax.rem(copied[0], slots), lambda copy: copy.start())
                copied[0] += 1
                ahead[1] = block + 1

                @pl.when((block + 1) * span >= items.until[item])
                def _():
                    go_ahead_to(following[item + 1])

        @pl.when(item == 0)
        def _():
            copied[0] = 0
            used[0] = 0
            go_ahead_to(following[0])
            lax.fori_loop(0, slots - 1, lambda *_: copy_next(), None)

        @pl.when((item == 0) | (items.tile[jnp.maximum(item - 1, 0)] != items.tile[item]))
        def _():
            peak[...] = jnp.full(peak.shape, _MASKED, jnp.float32)
            total[...] = jnp.zeros(total.shape, jnp.float32)
            values[...] = jnp.zeros(values.shape, jnp.float32)

        def fold(slot, start, masked):
            """Fold a block that begins at position `start` into the running softmax."""
            if masked:
                token = lax.broadcasted_iota(jnp.int32, (queries, 1), 0)
                own = (token >= items.first[item]) & (token < items.last[item])
                since, until = limits[0, :, 0:1], jnp.where(own, limits[0, :, 1:2], 0)
                if queries > 1:
                    since, until = (
                        jnp.concatenate([limit] * (rows // queries)) for limit in (since, until)
                    )
                position = start + lax.broadcasted_iota(jnp.int32, (rows, span), 1)
                seen = (position >= since) & (position < until)

                def written(*shape):
                    position = start + lax.broadcasted_iota(jnp.int32, shape, shape.index(span))
                    return (position >= items.since[item]) & (position < items.until[item])

            def fold_head(head, _):
                scores = product(q[0, head], k_ring[slot, head].astype(q.dtype))
                for ring in scale_ring:
                    scores *= ring[slot, head, 0:1]
                scores = _in_octaves(scores, scale, soft_cap)
                block_values = v_ring[slot, head].astype(q.dtype)
                if masked:
                    scores = jnp.where(seen, scores, _MASKED)
                    # Others may be NaN.
                    of_values = written(1, span) if turned else written(span, 1)
                    block_values = jnp.where(of_values, block_values, 0)
                old_peak = peak[head]
                new_peak = jnp.maximum(old_peak, jnp.max(scores, axis=1, keepdims=True))
                weights = jnp.exp2(scores - _across(new_peak, span))
                shrink = jnp.exp2(old_peak - new_peak)
                peak[head] = new_peak
                total[head] = total[head] * shrink + _sum_to(weights, sizes.lanes)
                for ring in scale_ring:
                    v_scale = ring[slot, head, 1:2]
                    weights *= jnp.where(written(1, span), v_scale, 0) if masked else v_scale
                added = product(weights.astype(q.dtype), block_values, turned)
                values[head] = values[head] * _across(shrink, dim) + added

            # A decode head's products have latencies longer than their work: unrolled heads fill
            # the gaps. A chunk's products fill them alone, and the registers as well.
            lax.fori_loop(0, heads, fold_head, None, unroll=queries == 1)

        def attend_to(block, _):
            copy_next()
            slot = lax.rem(used[0], slots)
            used[0] += 1
            for_each_page(item, block, slot, lambda copy: copy.wait())
            start = block * span
            whole = (start >= items.all_since[item]) & (start + span <= items.all_until[item])
            pl.when(whole)(functools.partial(fold, slot, start, masked=False))
            pl.when(~whole)(functools.partial(fold, slot, start, masked=True))

        lax.fori_loop(first_block(item), ceil_div(items.until[item], span), attend_to, None)

        following_item = jnp.minimum(item + 1, num_items - 1)

        @pl.when((item == num_items - 1) | (items.tile[following_item] != items.tile[item]))
        def _():
            def finish_head(head, _):
                top = peak[head][:, :1]
                whole = jnp.sum(total[head], axis=1, keepdims=True)
                seen = top > _MASKED
                out[0, head] = jnp.where(seen, values[head] / whole, 0).astype(out.dtype)
                lse[0, head] = jnp.where(seen, top / _LOG2E + jnp.log(whole), -jnp.inf).T

            lax.fori_loop(0, heads, finish_head, None)

    def of_tile(head_group, item, work, *_):
        return work[item], head_group, 0, 0

    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(kv_heads // heads, num_items),
            in_specs=(
                pl.BlockSpec((1, heads, rows, dim), of_tile),
                pl.BlockSpec((1, queries, 2), lambda _, item, work, *__: (work[item], 0, 0)),
                *[pl.BlockSpec(memory_space=pl.ANY)] * len(pool),
            ),
            out_specs=(
                pl.BlockSpec((1, heads, rows, dim), of_tile),
                pl.BlockSpec((1, heads, 1, rows), of_tile),
            ),
            scratch_shapes=(
                *rings,
                pltpu.SemaphoreType.DMA((slots,)),
                pltpu.VMEM((heads, rows, sizes.lanes), jnp.float32),
                pltpu.VMEM((heads, rows, sizes.lanes), jnp.float32),
                pltpu.VMEM((heads, rows, dim), jnp.float32),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SMEM((1,), jnp.int32),
            ),
        ),
        out_shape=(
            jax.ShapeDtypeStruct(q.shape, out_dtype),
            jax.ShapeDtypeStruct((tiles, kv_heads, 1, rows), jnp.float32),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=_VMEM_BYTES,
            disable_bounds_checks=True,  # ids are clipped; checks double the work of a copy
            disable_semaphore_checks=True,
        ),
        name="paged_attention",
        interpret=interpret or False,
    )(work, following, tables.reshape(-1), q, limits, *pool)


def _in_octaves(products, scale, soft_cap):
    """Scores times log2(e), because the hardware has exp2."""
    if soft_cap is None:
        return products * (scale * _LOG2E)
    return jnp.tanh(products * (scale / soft_cap)) * (soft_cap * _LOG2E)


def _across(columns, width):
    """[rows, lanes] of equal columns as [rows, width]."""
    copies = math.ceil(width / columns.shape[1])
    return jnp.concatenate([columns] * copies, axis=1)[:, :width]


def _sum_to(array, lanes):
    """[rows, n * lanes] as [rows, lanes], every lanes-th column added up."""
    return sum(array[:, lane : lane + lanes] for lane in range(0, array.shape[1], lanes))
