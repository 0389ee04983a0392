"""Decode attention over pages on Hopper GPUs: split-KV (Flash-Decoding) in Mosaic GPU.

A row's context is cut into splits (`decode_work`). A work list of all rows' splits, times KV heads,
is dealt out: one block of threads per multiprocessor takes every n-th of it. Partial results are
merged by log-sum-exp in a second kernel (`mosaic_gpu_merge`). How a row is cut depends on what it
sees alone, so its result does not depend on the batch. Outside the two kernels there is one sum,
the same for every layer of a step: where layers are unrolled, XLA computes it once.

In one block, two streams work side by side, each on entries of its own: a warpgroup that issues
loads and one that computes. The loader walks its entries without a pause, page by page into a ring
in shared memory, so the first pages of an entry arrive while the previous one is being finished.
Keys and values signal arrival and release separately.

Packed pages (int8, float8) land in a ring of their own, as they are. The tensor cores need both
operands in one dtype, so the loader, which is idle but for issuing, turns each tile into one of the
queries' dtype as soon as the computing warpgroup has done with the tile before. It follows its own
copies at a distance of all the places of the ring but one, and a place that it has read is free
without asking anybody.

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
- Partial results: 4 query heads write 4 * 129 * 4 bytes for each 512 tokens of 256 KiB, and twice
  as many are read, as rows of a tile come in eights: 2.4 % of the traffic.
- Packed pages: a tile is 16 KiB, which take 790 cycles to load. Shared memory moves 128 bytes a
  cycle, and 112 KiB for each tile: 16 from the copy, 16 and 32 to unpack it, 48 to the products.
  That is 900 cycles: packed pages are read at 88 % of the full speed at best. Of 128 KiB as above,
  half holds two unpacked tiles and half four packed ones, of which at least two are on their way.

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
from pallas_kernels.paged_attention.decode_work import TILE, Cutting
from pallas_kernels.paged_attention.hopper import LOG2E, MASKED, across, soft_capped
from pallas_kernels.paged_attention.mosaic_gpu_merge import merge_splits

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.layout import KVPages, RaggedBatch, Visible

DTYPES = ("bfloat16", "float16")
PACKED_DTYPES = ("int8", "float8_e4m3fn")
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)
MAX_GROUP = 64
"""Query heads of a KV head: the rows of a wgmma."""

MAX_SPLITS = 256
"""Splits of a row times KV heads: about two for each multiprocessor when a row is alone."""

_ROWS = MAX_GROUP
_SMEM_BYTES = 225 * 1024  # of the 227 KiB a block may have, for barriers and log-sum-exps
_WGMMA = plgpu.Layout.WGMMA


def unsupported(q: jax.Array, pages: KVPages) -> str | None:
    """Why `paged_decode` refuses arrays of these shapes and dtypes, None if it does not."""
    heads, head_dim = q.shape[1:]
    kv_heads, page_size = pages.k.shape[1], pages.k.shape[3]
    if q.dtype.name not in DTYPES:
        return f"queries are {q.dtype}; they can be {' or '.join(DTYPES)}."
    stored = (q.dtype.name, *PACKED_DTYPES)
    if pages.k.dtype != pages.v.dtype or pages.k.dtype.name not in stored:
        return (
            f"keys are {pages.k.dtype} and values {pages.v.dtype}; with queries of {q.dtype}, "
            f"both can be {', '.join(stored[:-1])} or {stored[-1]}."
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
    visible: Visible,
    *,
    num_decodes: int,
    scale: float,
    soft_cap: float | None = None,
    split_tokens: int = 512,
    num_sms: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """`api.attend` for the first `num_decodes` rows, which have one token each.

    A row is cut into splits of `split_tokens`, a multiple of 64, doubled until there are at most
    MAX_SPLITS / kv_heads of them. num_sms: blocks of threads, those of the device unless given.
    interpret: what `compat.gpu_interpreter` gives, to run on the host.

    A page id outside the pool is taken for the nearest one inside, and of a row that claims to see
    more than its row of the tables could hold, only that much is seen.

    Returns out [num_decodes, query_heads, head_dim] and lse [num_decodes, query_heads] float32; 0
    and -inf for a row that sees nothing. Raises ValueError for what `unsupported` names, for
    num_decodes below 1 and for other split_tokens.
    """
    if reason := unsupported(q, pages):
        raise ValueError(f"Mosaic GPU paged_decode: {reason}")
    if num_decodes < 1:
        raise ValueError(f"num_decodes is {num_decodes}; at least 1 row is needed.")
    if split_tokens < 1 or split_tokens % TILE:
        raise ValueError(f"split_tokens is {split_tokens}; it must be a multiple of {TILE}.")
    heads, head_dim = q.shape[1:]
    kv_heads, page_size = pages.k.shape[1], pages.k.shape[3]
    group = heads // kv_heads
    tokens = batch.tables.shape[1] * page_size
    cutting = Cutting.of(tokens, split_tokens, max(1, MAX_SPLITS // kv_heads))
    since, until = visible
    ends = cutting.ends(since[:num_decodes], until[:num_decodes])

    # Rows of a tile in shared memory come in eights.
    q = q.reshape(-1, kv_heads, group, head_dim)
    if padding := -group % 8:
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
    parts = kernel(q, pages.k, pages.v, batch.tables, since, until, ends)
    return merge_splits(
        *parts, since, until, cutting=cutting, group=group, dtype=q.dtype, interpret=interpret
    )


def _kernel(q, pages, *, cutting, rows, group, scale, soft_cap, blocks, interpret):
    """From q [at least rows, kv_heads, padded group, dim], k, v, tables, since, until and where the
    entries of rows end to partial out [splits, rows, kv_heads, padded group, dim] and lse [splits,
    rows, kv_heads, padded group], of which only what belongs to an entry is written."""
    _, kv_heads, padded, dim = q.shape
    num_pages, _, _, page_size = pages.k.shape
    packed = pages.k.dtype != q.dtype
    piece = min(page_size, TILE)  # tokens of one copy, contiguous in a page
    pieces = TILE // piece
    streams = 1 if dim == 256 else 2
    workers = blocks * streams
    tile_bytes = streams * 2 * TILE * dim * q.dtype.itemsize
    room = _SMEM_BYTES - streams * _ROWS * dim * (q.dtype.itemsize + 4)
    stages = landings = min(4, room // tile_bytes)
    if packed:
        # One tile for the tensor cores, and as many as there is room for before it.
        stages, packed_bytes = 1, tile_bytes // q.dtype.itemsize
        landings = min(4, (room - tile_bytes) // packed_bytes)
    in_layout = functools.partial(compat.in_layout, interpret=interpret)
    positions = functools.partial(compat.positions, layout=_WGMMA, interpret=interpret)

    def paged_decode_kernel(q, k, v, tables, since, until, ends, out, lse, *scratch):
        q_tile, k_ring, v_ring, out_tile, lse_tile, *scratch = scratch
        q_full, k_full, v_full, k_free, v_free, *landing = scratch
        k_land, v_land, k_landed, v_landed = landing or (k_ring, v_ring, k_full, v_full)
        warpgroup = lax.axis_index("warpgroup")
        stream = lax.rem(warpgroup, streams)
        worker = lax.axis_index("block") * streams + stream
        units = ends[rows - 1] * kv_heads
        own_units = lax.div(units - worker + (workers - 1), workers)

        def entry_of(index):
            unit = worker + index * workers
            number = jnp.minimum(lax.div(unit, kv_heads), ends[rows - 1] - 1)
            return lax.rem(unit, kv_heads), cutting.entry(number, ends, since, until, rows)

        def slot_of(tile, slots=stages):
            # Of one slot, the compiler must not know that it is number 0: it would keep what tells
            # the tensor cores where operands lie in more registers than there are.
            place = lax.rem(tile, slots) if slots > 1 else lax.shift_right_logical(tile, 30)
            return stream * slots + place

        @pl.when(warpgroup < streams)
        def compute():
            if streams == 2:
                plgpu.set_max_registers(192 if packed else 208, action="increase")
            for stage in range(stages):
                plgpu.barrier_arrive(k_free.at[stream * stages + stage])
                plgpu.barrier_arrive(v_free.at[stream * stages + stage])

            def load_queries(head, entry):
                # The tile's other rows are never set, and their results never used.
                target = q_tile.at[stream, pl.ds(0, padded)]
                plgpu.copy_gmem_to_smem(q.at[entry.row, head], target, q_full.at[stream])

            def attend(index, carry):
                tiles_before, head, entry = carry

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
                        seen = (position >= entry.since) & (position < entry.until)
                        scores[n] = jnp.where(seen, _in_octaves(scores[n], scale, soft_cap), MASKED)
                        new_peak = jnp.maximum(new_peak, jnp.max(scores[n], axis=1))
                    shrink = jnp.exp2(peak - new_peak)
                    total *= shrink
                    weights = []
                    for score in scores:
                        weight = jnp.exp2(score - across(new_peak, piece))
                        total += jnp.sum(weight, axis=1)
                        weights.append(weight.astype(q_tile.dtype))
                    plgpu.barrier_wait(v_full.at[slot])

                    @pl.when((start < entry.since) | (start + TILE > entry.until))
                    def _():
                        zero_invisible(v_ring.at[slot], start, entry)

                    values *= across(shrink, dim)
                    rights = [v_ring.at[slot, pl.ds(n * piece, piece)] for n in range(pieces)]
                    values = compat.add_products(values, weights, rights, interpret)
                    plgpu.barrier_arrive(v_free.at[slot])
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

            def zero_invisible(tile, start, entry):
                """What is not seen has no weight, but nothing times NaN would still be NaN."""
                position = positions((TILE, 64), 0) + start
                seen = (position >= entry.since) & (position < entry.until)
                for column in range(0, dim, 64):
                    part = tile.at[:, pl.ds(column, 64)]
                    value = in_layout(part[...], _WGMMA)
                    part[...] = jnp.where(seen, value, jnp.zeros_like(value))
                plgpu.commit_smem()

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

            def load_entry(index, tiles_before):
                head, entry = entry_of(index)
                last_page = lax.div(entry.until - 1, page_size)

                def load_tile(tile, _):
                    start = (entry.first_tile + tile) * TILE
                    offset = pl.multiple_of(lax.rem(start, page_size), piece)
                    # Read before waiting, so that their latency is not added to the wait. Beyond
                    # the row's last page, that page again: what is loaded then is masked.
                    ids = [
                        tables[entry.row, jnp.minimum(lax.div(start, page_size) + n, last_page)]
                        for n in range(pieces)
                    ]
                    ids = [jnp.clip(page, 0, num_pages - 1) for page in ids]
                    number = tiles_before + tile
                    slot = slot_of(number, landings)
                    if not packed:
                        plgpu.barrier_wait(k_free.at[slot])
                    for n, page in enumerate(ids):
                        source = k.at[page, head, :, pl.ds(offset, piece)]
                        plgpu.copy_gmem_to_smem(source, k_land.at[slot, n], k_landed.at[slot])
                    if not packed:
                        plgpu.barrier_wait(v_free.at[slot])
                    for n, page in enumerate(ids):
                        source = v.at[page, head, pl.ds(offset, piece)]
                        target = v_land.at[slot, pl.ds(n * piece, piece)]
                        plgpu.copy_gmem_to_smem(source, target, v_landed.at[slot])
                    if packed:
                        pl.when(number >= landings - 1)(lambda: unpack(number - (landings - 1)))

                lax.fori_loop(0, entry.tiles, load_tile, None)
                return tiles_before + entry.tiles

            def unpack(tile):
                """From where it landed, which is free from then on, to where it is multiplied."""
                source, target = slot_of(tile, landings), slot_of(tile)
                plgpu.barrier_wait(k_landed.at[source])
                plgpu.barrier_wait(k_free.at[target])
                for n in range(pieces):
                    widen(k_land.at[source, n], k_ring.at[target, n])
                plgpu.commit_smem()
                plgpu.barrier_arrive(k_full.at[target])
                plgpu.barrier_wait(v_landed.at[source])
                plgpu.barrier_wait(v_free.at[target])
                widen(v_land.at[source], v_ring.at[target])
                plgpu.commit_smem()
                plgpu.barrier_arrive(v_full.at[target])

            def widen(source, target):
                rows, columns = source.shape
                for row in range(0, rows, 64):
                    for column in range(0, columns, 64):
                        part = pl.ds(row, 64), pl.ds(column, min(64, columns))
                        value = in_layout(source[part], plgpu.Layout.WGMMA_UPCAST_2X)
                        target[part] = _widened(value, target.dtype)

            tiles = lax.fori_loop(0, own_units, load_entry, jnp.int32(0))
            if packed:
                waiting = jnp.maximum(tiles - (landings - 1), 0)
                lax.fori_loop(waiting, tiles, lambda tile, _: unpack(tile), None)
            for stage in range(stages):
                plgpu.barrier_wait(k_free.at[stream * stages + stage])
                plgpu.barrier_wait(v_free.at[stream * stages + stage])

    def matrix(*shape, columns, dtype):
        """Shared memory in the order that copies and tensor cores know, `columns` a tile wide."""
        row_bytes = columns * jnp.dtype(dtype).itemsize
        if row_bytes < 32:
            return plgpu.SMEM(shape, dtype)
        order = plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(row_bytes)
        return plgpu.SMEM(shape, dtype, transforms=order)

    ring = streams * stages
    copied = functools.partial(plgpu.Barrier, num_barriers=streams * landings, num_arrivals=pieces)
    done = functools.partial(plgpu.Barrier, num_barriers=ring)
    filled = done if packed else copied
    landing = ()
    if packed:
        landing = (
            matrix(streams * landings, pieces, dim, piece, columns=piece, dtype=pages.k.dtype),
            matrix(streams * landings, TILE, dim, columns=64, dtype=pages.v.dtype),
            copied(),
            copied(),
        )
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
            # Operands of a wgmma share one swizzle, and keys lie along tokens: a copy's width
            # decides.
            matrix(streams, _ROWS, dim, columns=piece, dtype=q.dtype),
            matrix(ring, pieces, dim, piece, columns=piece, dtype=q.dtype),
            matrix(ring, TILE, dim, columns=piece, dtype=q.dtype),
            plgpu.SMEM((streams, _ROWS, dim), jnp.float32),
            plgpu.SMEM((streams, _ROWS), jnp.float32),
            plgpu.Barrier(num_barriers=streams),
            filled(),
            filled(),
            done(),
            done(),
            *landing,
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


def _widened(values, dtype):
    """int8 or float8 as `dtype`, exactly.

    The hardware turns pairs of float8 into float16, and the compiler knows a short way from int8 to
    bfloat16. From there the way to the other half precision leads through float32.
    """
    first = jnp.bfloat16 if values.dtype == jnp.int8 else jnp.float16
    values = values.astype(first)
    return values if dtype == first else values.astype(jnp.float32).astype(dtype)
