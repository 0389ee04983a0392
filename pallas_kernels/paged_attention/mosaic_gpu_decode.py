"""Decode attention over pages on Hopper GPUs: split-KV (Flash-Decoding) in Mosaic GPU.

A row's context is cut into splits, the splits of all rows into a work list of (row, split, KV
head), and one block of threads per multiprocessor takes every n-th entry of it. Partial results
are merged by log-sum-exp in XLA. How a row is cut depends on its own context alone, so its result
does not depend on the batch. Both the work list and the tables are the same for every layer of a
step: where layers are unrolled, XLA computes the list once.

In one block, two streams work side by side, each on entries of its own: a warpgroup that issues
loads and one that computes. The loader walks its entries without a pause, page by page into a ring
in shared memory, so the first pages of an entry arrive while the previous one is being finished.
Keys and values signal arrival and release separately.

Arithmetic behind the sizes (not measurements), for head_dim 128 and 2-byte elements, on an H200
(132 multiprocessors, 1.755 GHz, 4.8 TB/s, thus 20.7 bytes per cycle and multiprocessor):

- Bytes in flight: at a latency of 1 us under load, 4.8 TB/s needs 36 KiB per multiprocessor on
  their way. A tile of 64 tokens is 16 KiB of keys and 16 KiB of values; two streams of two tiles
  are 128 KiB, of which at most half is being computed on: at least 64 KiB are on their way.
- Shared memory: that ring of 128 KiB, two tiles of queries padded to 64 rows (32 KiB) and two
  float32 tiles of results (64 KiB) make 224 of the 227 KiB a block may have.
- Computation: a tile takes 32 KiB / 20.7 = 1580 cycles to load at full speed. Its two products,
  padded to the 64 rows of a wgmma, take 2 * 256 cycles of tensor core, its 4096 exponentials 256
  cycles, and some ten other operations on scores about 320. That is one after the other some 1100
  cycles and latencies: one stream could just keep up, two have time to spare.
- Registers: 4 warpgroups share 65,536, so 128 a thread at launch; loaders give theirs up (40) and
  the others take them (208): 64 for the output, 32 for scores, 16 for weights, the rest in passing.
- Partial results: 4 query heads write and later read 4 * 129 * 4 bytes for each 512 tokens of
  256 KiB: 1.6 % of the traffic.

With head_dim 256 an output takes 128 registers and a stream 224 KiB of shared memory, so there is
one stream. With pages of 16 or 32 tokens a tile is loaded and multiplied in pieces.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.merge import merge
from pallas_kernels.paged_attention.decode_work import TILE, Entry, ceil_div, work_list

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.api import KVPages, RaggedBatch

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
MAX_GROUP = 64
"""Query heads of a KV head: the rows of a wgmma."""

MAX_SPLITS = 256
"""Splits of a row times KV heads: about two for each multiprocessor when a row is alone."""

_ROWS = MAX_GROUP
_SMEM_BYTES = 225 * 1024  # of the 227 KiB a block may have, for barriers and log-sum-exps
_MASKED = -1e30
_LOG2E = math.log2(math.e)
_WGMMA = plgpu.Layout.WGMMA


def unsupported(q: jax.Array, pages: KVPages) -> str | None:
    """Why `paged_decode` refuses arrays of these shapes and dtypes, None if it does not."""
    heads, head_dim = q.shape[1:]
    kv_heads, page_size = pages.k.shape[1], pages.k.shape[3]
    if not q.dtype == pages.k.dtype == pages.v.dtype or q.dtype.name not in DTYPES:
        return (
            f"queries are {q.dtype}, keys {pages.k.dtype} and values {pages.v.dtype}; "
            f"all must be of one of {', '.join(DTYPES)}."
        )
    if head_dim not in HEAD_DIMS:
        return f"head_dim is {head_dim}; it can be one of {HEAD_DIMS}."
    if page_size not in PAGE_SIZES:
        return f"page_size is {page_size}; it can be one of {PAGE_SIZES}."
    if heads % kv_heads or heads // kv_heads > MAX_GROUP:
        return (
            f"{heads} query heads share {kv_heads} KV heads; "
            f"each KV head can have a whole number of them up to {MAX_GROUP}."
        )
    return None


def paged_decode(
    q: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    *,
    num_decodes: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    split_tokens: int = 512,
    num_sms: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`api.paged_attention` of the first `num_decodes` rows, which have one token each.

    soft_cap: scores become soft_cap * tanh(scores / soft_cap). sinks [query_heads] float32: a
    score of each head that takes part in its softmax and has no value.

    A row is cut into splits of `split_tokens`, a multiple of 64, doubled until there are at most
    MAX_SPLITS / kv_heads of them. num_sms: blocks of threads, those of the device unless given.
    interpret: what `compat.gpu_interpreter` gives, to run on the host.

    A page id outside the pool is taken for the nearest one inside, and a context longer than its
    row of the tables for as long as that.

    Returns out [num_decodes, query_heads, head_dim] and lse [num_decodes, query_heads] float32,
    sinks included; 0 and -inf for a row with no context, sinks or not. Raises ValueError for what
    `unsupported` names, for num_decodes or window below 1 and for other split_tokens.
    """
    if reason := unsupported(q, pages):
        raise ValueError(f"Mosaic GPU paged_decode: {reason}")
    if num_decodes < 1:
        raise ValueError(f"num_decodes is {num_decodes}; at least 1 row is needed.")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}; a token sees at least itself.")
    if split_tokens < 1 or split_tokens % TILE:
        raise ValueError(f"split_tokens is {split_tokens}; it must be a multiple of {TILE}.")
    heads, head_dim = q.shape[1:]
    kv_heads, page_size = pages.k.shape[1], pages.k.shape[3]
    group = heads // kv_heads
    tables = batch.tables[:num_decodes]
    context = jnp.minimum(batch.context[:num_decodes], tables.shape[1] * page_size)

    max_tiles = ceil_div(tables.shape[1] * page_size, TILE)
    if window is not None:
        max_tiles = min(max_tiles, ceil_div(window - 1, TILE) + 1)
    splits = min(ceil_div(max_tiles * TILE, split_tokens), max(1, MAX_SPLITS // kv_heads))
    since = jnp.zeros_like(context) if window is None else jnp.maximum(context - window, 0)
    work, counts = work_list(since, context, max_tiles, split_tokens // TILE, splits)

    # Rows of a tile in shared memory come in eights.
    padding = -group % 8
    q = q[:num_decodes].reshape(num_decodes, kv_heads, group, head_dim)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, padding), (0, 0)))
    kernel = _kernel(
        q,
        pages,
        group=group,
        splits=splits,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        blocks=num_sms or compat.num_sms(),
        interpret=interpret,
    )
    entries = jnp.sum(counts, keepdims=True)
    partial_out, partial_lse = kernel(q, pages.k, pages.v, tables, work, entries)
    partial_lse = partial_lse[..., :group].reshape(splits, num_decodes, heads)
    written = jnp.arange(splits)[:, None] < counts
    out, lse = merge(partial_out, jnp.where(written[..., None], partial_lse, -jnp.inf))
    if sinks is not None:
        present, alone = lse > -jnp.inf, lse
        lse = jnp.where(present, jnp.logaddexp(lse, sinks), -jnp.inf)
        out *= jnp.where(present, jnp.exp(alone - lse), 0)[..., None]
    return out.astype(q.dtype), lse


def _kernel(q, pages, *, group, splits, scale, window, soft_cap, blocks, interpret):
    """From q [rows, kv_heads, padded group, dim], k, v, tables, work list and entries [1] to
    partial out [splits, rows, heads, dim] and lse [splits, rows, kv_heads, padded group]."""
    rows, kv_heads, padded, dim = q.shape
    num_pages, _, _, page_size = pages.k.shape
    piece = min(page_size, TILE)  # tokens of one copy, contiguous in a page
    pieces = TILE // piece
    streams = 1 if dim == 256 else 2
    workers = blocks * streams
    item_bytes = q.dtype.itemsize
    fixed_bytes = streams * _ROWS * dim * (item_bytes + 4)
    tile_bytes = 2 * TILE * dim * item_bytes
    stages = min(4, (_SMEM_BYTES - fixed_bytes) // (streams * tile_bytes))
    ring = streams * stages
    in_layout = functools.partial(compat.in_layout, interpret=interpret)
    positions = functools.partial(compat.positions, layout=_WGMMA, interpret=interpret)

    def paged_decode_kernel(q, k, v, tables, work, entries, out, lse, *scratch):
        q_tile, k_ring, v_ring, out_tile, lse_tile, *barriers = scratch
        q_full, k_full, v_full, k_free, v_free = barriers
        warpgroup = lax.axis_index("warpgroup")
        stream = lax.rem(warpgroup, streams)
        worker = lax.axis_index("block") * streams + stream
        units = entries[0] * kv_heads
        own_units = lax.div(units - worker + (workers - 1), workers)

        def entry_of(index):
            unit = worker + index * workers
            entry = lax.div(unit, kv_heads)
            return lax.rem(unit, kv_heads), Entry(*(work[entry, n] for n in range(6)))

        def slot_of(tile):
            return stream * stages + lax.rem(tile, stages)

        @pl.when(warpgroup < streams)
        def compute():
            if streams == 2:
                plgpu.set_max_registers(208, action="increase")
            for stage in range(stages):
                plgpu.barrier_arrive(k_free.at[stream * stages + stage])
                plgpu.barrier_arrive(v_free.at[stream * stages + stage])

            def load_queries(index):
                # The tile's other rows are never set, and their results never used.
                head, entry = entry_of(index)
                target = q_tile.at[stream, pl.ds(0, padded)]
                plgpu.copy_gmem_to_smem(q.at[entry.row, head], target, q_full.at[stream])

            def attend(index, tiles_before):
                head, entry = entry_of(index)

                def fold(tile, carry):
                    slot = slot_of(tiles_before + tile)
                    start = (entry.first_tile + tile) * TILE
                    peak, total, values = carry
                    plgpu.barrier_wait(k_full.at[slot])
                    scores = [
                        compat.product(q_tile.at[stream], k_ring.at[slot, n]) for n in range(pieces)
                    ]
                    plgpu.barrier_arrive(k_free.at[slot])
                    new_peak = peak
                    for n in range(pieces):
                        position = positions((_ROWS, piece), 1) + (start + n * piece)
                        seen = position < entry.until
                        if window is not None:
                            seen &= position >= entry.since
                        scores[n] = jnp.where(
                            seen, _in_octaves(scores[n], scale, soft_cap), _MASKED
                        )
                        new_peak = jnp.maximum(new_peak, jnp.max(scores[n], axis=1))
                    shrink = jnp.exp2(peak - new_peak)
                    total *= shrink
                    weights = []
                    for score in scores:
                        weight = jnp.exp2(score - _across(new_peak, piece))
                        total += jnp.sum(weight, axis=1)
                        weights.append(weight.astype(pages.v.dtype))
                    plgpu.barrier_wait(v_full.at[slot])

                    @pl.when((start < entry.since) | (start + TILE > entry.until))
                    def _():
                        zero_invisible(slot, start, entry)

                    values *= _across(shrink, dim)
                    rights = [v_ring.at[slot, pl.ds(n * piece, piece)] for n in range(pieces)]
                    values = compat.add_products(values, weights, rights, interpret)
                    plgpu.barrier_arrive(v_free.at[slot])
                    return new_peak, total, values

                def full(value, *columns):
                    layout = _WGMMA if columns else _WGMMA.reduce(1)
                    return in_layout(jnp.full((_ROWS, *columns), value, jnp.float32), layout)

                carry = full(_MASKED), full(0), full(0, dim)
                plgpu.barrier_wait(q_full.at[stream])
                peak, total, values = lax.fori_loop(0, entry.tiles, fold, carry)

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous entry's results
                out_tile[stream] = values * _across(1 / total, dim)
                lse_tile[stream] = peak * (1 / _LOG2E) + jnp.log(total)
                plgpu.commit_smem()
                target = out.at[entry.split, entry.row, pl.ds(head * group, group)]
                plgpu.copy_smem_to_gmem(out_tile.at[stream, pl.ds(0, group)], target)
                target = lse.at[entry.split, entry.row, head]
                plgpu.copy_smem_to_gmem(lse_tile.at[stream, pl.ds(0, padded)], target)

                @pl.when(index + 1 < own_units)
                def _():
                    load_queries(index + 1)

                return tiles_before + entry.tiles

            def zero_invisible(slot, start, entry):
                """What is not seen has no weight, but nothing times NaN would still be NaN."""
                position = positions((TILE, 64), 0) + start
                seen = (position >= entry.since) & (position < entry.until)
                for column in range(0, dim, 64):
                    part = v_ring.at[slot, :, pl.ds(column, 64)]
                    value = in_layout(part[...], _WGMMA)
                    part[...] = jnp.where(seen, value, jnp.zeros_like(value))
                plgpu.commit_smem()

            @pl.when(own_units > 0)
            def _():
                load_queries(jnp.int32(0))

            lax.fori_loop(0, own_units, attend, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup >= streams)
        def load():
            if streams == 2:
                plgpu.set_max_registers(40, action="decrease")

            def load_entry(index, tiles_before):
                head, entry = entry_of(index)
                last_page = lax.div(entry.until - 1, page_size)

                def load_tile(tile, _):
                    slot = slot_of(tiles_before + tile)
                    start = (entry.first_tile + tile) * TILE
                    offset = pl.multiple_of(lax.rem(start, page_size), piece)
                    # Read before waiting, so that their latency is not added to the wait. Beyond
                    # the row's last page, that page again: what is loaded then is masked.
                    ids = [
                        tables[entry.row, jnp.minimum(lax.div(start, page_size) + n, last_page)]
                        for n in range(pieces)
                    ]
                    ids = [jnp.clip(page, 0, num_pages - 1) for page in ids]
                    plgpu.barrier_wait(k_free.at[slot])
                    for n, page in enumerate(ids):
                        source = k.at[page, head, :, pl.ds(offset, piece)]
                        plgpu.copy_gmem_to_smem(source, k_ring.at[slot, n], k_full.at[slot])
                    plgpu.barrier_wait(v_free.at[slot])
                    for n, page in enumerate(ids):
                        source = v.at[page, head, pl.ds(offset, piece)]
                        target = v_ring.at[slot, pl.ds(n * piece, piece)]
                        plgpu.copy_gmem_to_smem(source, target, v_full.at[slot])

                lax.fori_loop(0, entry.tiles, load_tile, None)
                return tiles_before + entry.tiles

            lax.fori_loop(0, own_units, load_entry, jnp.int32(0))
            for stage in range(stages):
                plgpu.barrier_wait(k_free.at[stream * stages + stage])
                plgpu.barrier_wait(v_free.at[stream * stages + stage])

    # Operands of a wgmma share one swizzle, and keys lie along tokens: a copy's width decides.
    swizzle = piece * item_bytes
    tiled = plgpu.TilingTransform((8, piece)), plgpu.SwizzleTransform(swizzle)
    return plgpu.kernel(
        paged_decode_kernel,
        out_type=(
            jax.ShapeDtypeStruct((splits, rows, kv_heads * group, dim), jnp.float32),
            jax.ShapeDtypeStruct((splits, rows, kv_heads, padded), jnp.float32),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=2 * streams,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((streams, _ROWS, dim), q.dtype, transforms=tiled),
            plgpu.SMEM((ring, pieces, dim, piece), q.dtype, transforms=tiled),
            plgpu.SMEM((ring, TILE, dim), q.dtype, transforms=tiled),
            plgpu.SMEM((streams, _ROWS, dim), jnp.float32),
            plgpu.SMEM((streams, _ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=streams),
            plgpu.Barrier(num_barriers=ring, num_arrivals=pieces),
            plgpu.Barrier(num_barriers=ring, num_arrivals=pieces),
            plgpu.Barrier(num_barriers=ring),
            plgpu.Barrier(num_barriers=ring),
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # no reduction crosses warps
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        interpret=interpret,
    )


def _in_octaves(products, scale, soft_cap):
    """Scores times log2(e), for exp2 is what the hardware has.

    tanh from exp2, whose error is a few units of the last place; the hardware's own tanh is right
    to eleven bits.
    """
    if soft_cap is None:
        return products * (scale * _LOG2E)
    growth = jnp.exp2(products * (2 * scale * _LOG2E / soft_cap))
    return (1 - 2 / (growth + 1)) * (soft_cap * _LOG2E)


def _across(per_row, columns):
    """[rows] as [rows, columns]."""
    return lax.broadcast_in_dim(per_row, (per_row.shape[0], columns), (0,))
