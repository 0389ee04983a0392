"""Decode attention over pages on Hopper GPUs: split-KV (Flash-Decoding) in Mosaic GPU.

A row's context is cut into splits (`decode_work`). The work list is all rows' splits, times KV
heads: one thread block per multiprocessor takes every n-th entry. Partial results are merged by
log-sum-exp in a second kernel (`merge`). The splits of a row depend only on its visible
range, so its result does not depend on the batch. Outside the two kernels there is one sum, the
same for every layer of a step: if layers are unrolled, XLA computes it once.

A block runs two streams in parallel, each with its own entries: a warpgroup that loads and one that
computes (`pages`). The loader walks its entries without pausing, so the first pages of
an entry arrive while the previous one is being finished.

Arithmetic behind the sizes (not measurements), for head_dim 128 and 2-byte elements, on an H200
(132 multiprocessors, 1.755 GHz, 4.8 TB/s, thus 20.7 bytes per cycle and multiprocessor):

- Bytes in flight: at a latency of 1 us under load, 4.8 TB/s needs 36 KiB per multiprocessor in
  flight. A tile of 64 tokens is 16 KiB of keys and 16 KiB of values; two streams of two tiles are
  128 KiB, of which at most half is being computed on: at least 64 KiB are in flight.
- Shared memory: that ring of 128 KiB, two tiles of queries padded to 64 rows (32 KiB) and two
  float32 tiles of results (64 KiB) make 224 of the 227 KiB a block may have.
- Computation: a tile takes 32 KiB / 20.7 = 1580 cycles to load at full speed. Its two products,
  padded to the 64 rows of a wgmma, take 2 * 256 cycles of tensor core, its 4096 exponentials 256
  cycles, and some ten other operations on scores about 320. In sequence that is some 1100 cycles
  plus latencies: one stream could just keep up, two have slack.
- Registers: 4 warpgroups share 65,536, so 128 per thread at launch; loaders release theirs (40) and
  the others take them (208): 64 for the output, 32 for scores, 16 for weights, the rest temporary.
- Partial results: 4 query heads write 4 * 129 * 4 bytes for each 512 tokens of 256 KiB, and twice
  as many are read, as rows of a tile come in eights: 2.4 % of the traffic.
- Quantized pages: a tile is 16 KiB, which takes 790 cycles to load. Shared memory has 128 bytes per
  cycle, and moves 112 KiB per tile: 16 from the copy, 16 and 32 to dequantize it, 48 to the
  products. That is 900 cycles: quantized pages are read at 88 % of full speed at best. Of 128 KiB
  as above, half holds two dequantized tiles and half four quantized ones, of which at least two are
  in flight.
- Scales: 512 bytes a tile, of which shared memory has room beside one landing tile, not two.

With head_dim 256 an output takes 128 registers and a stream 224 KiB of shared memory, so there is
one stream. With pages of 16 or 32 tokens a tile is loaded and multiplied in pieces.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import gpu as compat
from pallas_kernels.paged_attention.gpu import pages as gpu_pages
from pallas_kernels.paged_attention.gpu.decode_work import TILE, Cutting, worker_of
from pallas_kernels.paged_attention.gpu.hopper import LOG2E, MASKED, across, soft_capped
from pallas_kernels.paged_attention.gpu.merge import merge_splits
from pallas_kernels.paged_attention.gpu.pages import Loader, Ring, Seen, blank, matrix
from pallas_kernels.tuning import tuned

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.layout import KVPages, RaggedBatch, Visible

MAX_GROUP = 64
"""Query heads per KV head: the rows of a wgmma."""

MAX_SPLITS = 256
"""Splits of a row times KV heads: about two per multiprocessor for a batch of one row."""

MAX_PARTIAL_BYTES = 2**31
"""Of the partial results of all splits."""

SPLIT_TOKENS = 512
"""Of a split, on devices that were not measured."""

_ROWS = MAX_GROUP
_SMEM_BYTES = 225 * 1024  # of the 227 KiB a block may have, for barriers and log-sum-exps
_WGMMA = plgpu.Layout.WGMMA


def unsupported(
    q: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    num_decodes: int,
    split_tokens: int | None = None,
) -> str | None:
    """Why `paged_decode` refuses arrays of these shapes and dtypes, None if it does not."""
    if reason := gpu_pages.unsupported(q, pages):
        return reason
    heads, kv_heads = q.shape[1], pages.k.shape[1]
    if heads % kv_heads or heads // kv_heads > MAX_GROUP:
        return (
            f"{heads} query heads share {kv_heads} KV heads; "
            f"each KV head can have a whole number of them up to {MAX_GROUP}."
        )
    splits = _cutting(pages, batch, split_tokens).splits
    padded = kv_heads * _padded(heads // kv_heads)
    if (size := 4 * splits * num_decodes * padded * q.shape[2]) >= MAX_PARTIAL_BYTES:
        return (
            f"{num_decodes} decodes in {splits} splits have {size} bytes of partial results; "
            f"offsets are 32 bits, so they can have less than {MAX_PARTIAL_BYTES}."
        )
    return None


def _cutting(pages, batch, split_tokens):
    split_tokens = split_tokens or tuned("paged_decode", "split_tokens", SPLIT_TOKENS)
    tokens = batch.tables.shape[1] * pages.k.shape[3]
    return Cutting.of(tokens, split_tokens, max(1, MAX_SPLITS // pages.k.shape[1]))


def _scales(pages):
    return () if pages.scales is None else (pages.scales,)


def _padded(group):
    """Rows of a tile in shared memory come in eights."""
    return group + -group % 8


def paged_decode(
    q: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    visible: Visible,
    *,
    num_decodes: int,
    scale: float,
    soft_cap: float | None = None,
    out_dtype: jnp.dtype | None = None,
    split_tokens: int | None = None,
    num_sms: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`api.attend` for the first `num_decodes` rows, which have one token each.

    A row is cut into splits of `split_tokens`, a multiple of 64 and by default what was quickest on
    this kind of device, or of as many more as make at most MAX_SPLITS / kv_heads of them.

    num_sms: thread blocks, by default the device's multiprocessors.
    interpret: what `compat.gpu_interpreter` gives, to run on the host.

    Page ids are clipped to the pool, and a row's visible range to the capacity of its page table.

    Returns out [num_decodes, query_heads, head_dim] of `out_dtype`, by default that of q, and lse
    [num_decodes, query_heads] float32; 0 and -inf for a row that sees nothing. Raises ValueError
    for what `unsupported` names, for num_decodes below 1 and for other split_tokens.
    """
    if split_tokens is not None and (split_tokens < 1 or split_tokens % TILE):
        raise ValueError(f"split_tokens is {split_tokens}; it must be a multiple of {TILE}.")
    if num_decodes < 1:
        raise ValueError(f"num_decodes is {num_decodes}; at least 1 row is needed.")
    if reason := unsupported(q, pages, batch, num_decodes, split_tokens):
        raise ValueError(f"Mosaic GPU paged_decode: {reason}")
    heads, head_dim = q.shape[1:]
    kv_heads = pages.k.shape[1]
    group = heads // kv_heads
    cutting = _cutting(pages, batch, split_tokens)
    since, until = visible
    ends = cutting.ends(since[:num_decodes], until[:num_decodes])

    q = q.reshape(-1, kv_heads, group, head_dim)
    if padding := _padded(group) - group:
        q = jnp.pad(q[:num_decodes], ((0, 0), (0, 0), (0, padding), (0, 0)))
    kernel = _kernel(
        q,
        pages,
        cutting=cutting,
        rows=num_decodes,
        group=group,
        scale=scale,
        soft_cap=soft_cap,
        blocks=num_sms or compat.num_sms(),
        interpret=interpret,
    )
    parts = kernel(q, pages.k, pages.v, batch.tables, since, until, ends, *_scales(pages))
    return merge_splits(
        *parts,
        since,
        until,
        cutting=cutting,
        group=group,
        dtype=out_dtype or q.dtype,
        interpret=interpret,
    )


def _kernel(q, pages, *, cutting, rows, group, scale, soft_cap, blocks, interpret):
    """From q [at least rows, kv_heads, padded group, dim], k, v, tables, since, until and `ends` to
    partial out [splits, rows, kv_heads, padded group, dim] and lse [splits, rows, kv_heads, padded
    group], of which only the entries' parts are written."""
    _, kv_heads, padded, dim = q.shape
    packed, scaled = pages.k.dtype != q.dtype, pages.scales is not None
    streams = 1 if dim == 256 else 2
    workers = blocks * streams
    tile_bytes = streams * 2 * TILE * dim * q.dtype.itemsize
    room = _SMEM_BYTES - streams * _ROWS * dim * (q.dtype.itemsize + 4)
    stages, landings = min(4, room // tile_bytes), 0
    if packed:
        # One dequantized tile for the tensor cores, and as many quantized ones as fit.
        stages, packed_bytes = 1, tile_bytes // q.dtype.itemsize
        # Scales are of every tile in either ring.
        scale_bytes = streams * 2 * TILE * 4 if scaled else 0
        landings = min(4, (room - tile_bytes - scale_bytes) // (packed_bytes + scale_bytes))
    num_pages, _, _, page_size = pages.k.shape
    piece = min(page_size, TILE)
    ring = Ring(
        num_pages=num_pages,
        page_size=page_size,
        head_dim=dim,
        stored=pages.k.dtype,
        dtype=q.dtype,
        tile=TILE,
        stages=stages,
        landings=landings,
        value_columns=piece,
        streams=streams,
        scaled=scaled,
    )
    in_layout = functools.partial(compat.in_layout, interpret=interpret)
    positions = functools.partial(compat.positions, layout=_WGMMA, interpret=interpret)

    def paged_decode_kernel(q, k, v, tables, since, until, ends, *others):
        *scales, out, lse, q_tile, places, out_tile, lse_tile, q_full = others
        warpgroup = lax.axis_index("warpgroup")
        stream = lax.rem(warpgroup, streams)
        worker = worker_of(lax.axis_index("block"), stream, blocks)
        units = ends[rows - 1] * kv_heads
        own_units = lax.div(units - worker + (workers - 1), workers)

        def entry_of(index):
            unit = worker + index * workers
            number = jnp.minimum(lax.div(unit, kv_heads), ends[rows - 1] - 1)
            return lax.rem(unit, kv_heads), cutting.entry(number, ends, since, until, rows)

        @pl.when(warpgroup < streams)
        def compute():
            if streams == 2:
                plgpu.set_max_registers(192 if packed else 208, action="increase")
            ring.free_all(places, stream)

            def load_queries(head, entry):
                # The tile's other rows are uninitialised, and their results are not used.
                target = q_tile.at[stream, pl.ds(0, padded)]
                plgpu.copy_gmem_to_smem(q.at[entry.row, head], target, q_full.at[stream])

            def attend(index, carry):
                tiles_before, head, entry = carry

                def fold(tile, carry):
                    slot = ring.slot(tiles_before + tile, stream)
                    start = (entry.first_tile + tile) * TILE
                    peak, total, values = carry
                    plgpu.barrier_wait(places.k_full.at[slot])
                    keys = [places.k.at[slot, n] for n in range(ring.pieces)]
                    scores = [compat.product(q_tile.at[stream], piece) for piece in keys]
                    plgpu.barrier_arrive(places.k_free.at[slot])
                    new_peak = peak
                    if scaled:
                        scale_slot = ring.scale_slot(tiles_before + tile, stream)
                        of_keys = ring.scales(places, scale_slot, _ROWS, interpret)
                        scores = [score * own for score, own in zip(scores, of_keys)]
                    for n in range(ring.pieces):
                        position = positions((_ROWS, piece), 1) + (start + n * piece)
                        seen = (position >= entry.since) & (position < entry.until)
                        scores[n] = jnp.where(seen, _in_octaves(scores[n], scale, soft_cap), MASKED)
                        new_peak = jnp.maximum(new_peak, jnp.max(scores[n], axis=1))
                    shrink = jnp.exp2(peak - new_peak)
                    total *= shrink
                    weights = [jnp.exp2(score - across(new_peak, piece)) for score in scores]
                    for weight in weights:
                        total += jnp.sum(weight, axis=1)
                    if scaled:
                        of_values = ring.scales(places, scale_slot + 1, _ROWS, interpret)
                        weights = [weight * own for weight, own in zip(weights, of_values)]
                    weights = [weight.astype(q_tile.dtype) for weight in weights]
                    plgpu.barrier_wait(places.v_full.at[slot])

                    @pl.when((start < entry.since) | (start + TILE > entry.until))
                    def _():
                        seen = Seen(entry.since - start, entry.until - start)
                        blank(places.v.at[slot], seen, interpret)

                    values *= across(shrink, dim)
                    rights = [
                        places.v.at[slot, pl.ds(n * piece, piece)] for n in range(ring.pieces)
                    ]
                    values = compat.add_products(values, weights, rights, interpret)
                    plgpu.barrier_arrive(places.v_free.at[slot])
                    return new_peak, total, values

                def full(value, *columns):
                    layout = _WGMMA if columns else _WGMMA.reduce(1)
                    return in_layout(jnp.full((_ROWS, *columns), value, jnp.float32), layout)

                carry = full(MASKED), full(0), full(0, dim)
                plgpu.barrier_wait(q_full.at[stream])
                peak, total, values = lax.fori_loop(0, entry.tiles, fold, carry)

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous entry's results
                out_tile[stream] = values * across(1 / total, dim)
                lse_tile[stream] = peak * (1 / LOG2E) + jnp.log(total)
                plgpu.commit_smem()
                part = entry.split, entry.row, head
                source = out_tile.at[stream, pl.ds(0, group)]
                plgpu.copy_smem_to_gmem(source, out.at[*part, pl.ds(0, group)])
                plgpu.copy_smem_to_gmem(lse_tile.at[stream, pl.ds(0, padded)], lse.at[*part])

                following = entry_of(index + 1)

                @pl.when(index + 1 < own_units)
                def _():
                    load_queries(*following)

                return tiles_before + entry.tiles, *following

            first = entry_of(jnp.int32(0))

            @pl.when(own_units > 0)
            def _():
                load_queries(*first)

            lax.fori_loop(0, own_units, attend, (jnp.int32(0), *first))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup >= streams)
        def load():
            if streams == 2:
                plgpu.set_max_registers(64 if packed else 40, action="decrease")

            loader = Loader(ring, places, k, v, tables, interpret, stream, *scales)

            def load_entry(index, tiles_before):
                head, entry = entry_of(index)

                def load_tile(tile, _):
                    start = (entry.first_tile + tile) * TILE
                    seen = Seen(entry.since - start, entry.until - start)
                    loader.load(tiles_before + tile, entry.row, head, start, seen)

                lax.fori_loop(0, entry.tiles, load_tile, None)
                return tiles_before + entry.tiles

            loader.finish(lax.fori_loop(0, own_units, load_entry, jnp.int32(0)))

    return plgpu.kernel(
        paged_decode_kernel,
        out_type=(
            jax.ShapeDtypeStruct((cutting.splits, rows, kv_heads, padded, dim), jnp.float32),
            jax.ShapeDtypeStruct((cutting.splits, rows, kv_heads, padded), jnp.float32),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=2 * streams,
        thread_name="warpgroup",
        scratch_types=(
            # Operands of a wgmma share one swizzle, which the width of a copy of keys, contiguous
            # along tokens, decides.
            matrix(streams, _ROWS, dim, columns=piece, dtype=q.dtype),
            ring.scratch,
            plgpu.SMEM((streams, _ROWS, dim), jnp.float32),
            plgpu.SMEM((streams, _ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=streams),
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # no reduction crosses warps
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        interpret=interpret,
    )


def _in_octaves(products, scale, soft_cap):
    """Scores times log2(e)."""
    if soft_cap is None:
        return products * (scale * LOG2E)
    return soft_capped(products, scale, soft_cap, unit=LOG2E)
