"""Prefill attention over pages on Hopper GPUs: FlashAttention-3 on ragged rows, in Mosaic GPU.

A unit of work is a block of consecutive tokens of one row and as many query heads of one KV head as
fill the rows of two wgmmas with them: both read the same keys and values. `prefill_work` lists the
blocks, longest first, the same for all layers of a step; one block of threads per multiprocessor
takes every n-th unit, in turns from the front and from the back, so that all end together.

Three warpgroups work side by side (FlashAttention-3, 2407.08608). One loads: queries, and the keys
and values of the row's pages, tile by tile into a ring in shared memory, units ahead of time. Two
compute, 64 rows of queries each, and take turns on the tensor cores: in its turn, one hands over

    scores = queries @ keys of this tile,    values += weights @ values of the tile before

and passes the turn on, so that the other's products are queued behind its own while it waits; then
it makes weights of the scores while the other's are computed. The online softmax (1805.02867) works
in powers of two. Only tiles that some token of the block does not see in full are masked.

What is beyond a row's pages may be anything. The loader overwrites values that no token of the
block sees with zeros before it hands them on: no weight times NaN would still be NaN.

The tokens of a row begin anywhere, and a block with some of them at a multiple of 8, as copies to
shared memory must. Results are written by block, whole, and XLA picks each token's from there: it
writes them once more anyway, to join them with those of decodes and to blank those of no row.

Arithmetic behind the sizes (not measurements), for head_dim 128 and 2-byte elements, on an H200,
whose multiprocessors have 2048 multiply-adds a cycle in tensor cores and 16 exponentials:

- Rows: a unit has 128, so a tile of 128 positions takes 2 * 128 * 128 * 128 / 2048 = 2048 cycles
  and 64 KiB of loads, from the L2 cache mostly: 32 bytes a cycle. 64 rows would need 64.
- Tokens: with 4 query heads for each KV head, 128 rows are 32 tokens, so that short rows waste
  little. Heads that are packed are a power of two up to 8, which leaves 8 tokens to a copy.
- Turns: one takes 1024 cycles. Between two, a warpgroup takes 512 cycles of exponentials and some
  360 of other operations on the 64 scores of each thread, which overlap in part.
- Registers: 64 for values, 64 for scores, 32 for weights and the rest in passing, of 216; 72 are
  left for the loader. With head_dim 256 a tile is 64 positions, and it is 128, 32 and 16 of 232.
- Shared memory: two stages of the ring are 128 KiB, queries and results 32 KiB each; of 227. With
  head_dim 256, results replace the queries.
- Operands: a wgmma's left operand from shared memory is 2 KiB for every 16 features, its right one
  32 bytes for each position. At 128 bytes a cycle, pages of 128 positions keep up with ease (48
  cycles of 64), pages of 64 just so (32 of 32), and scores take 1.5 times as long with pages of 32
  and 2.5 times with pages of 16.

A short chunk of a very long row is one unit for each KV head, however long the row: few
multiprocessors work on it.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import gpu as compat
from pallas_kernels.paged_attention import wgmma_turns
from pallas_kernels.paged_attention.hopper import LOG2E, MASKED, across, soft_capped
from pallas_kernels.paged_attention.layout import KVPages, RaggedBatch, Visible
from pallas_kernels.paged_attention.prefill_work import ALIGNMENT, Block, work_list

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)
PAGE_SIZES = (16, 32, 64, 128)

_CONSUMERS = 2  # warpgroups that compute
_ROWS = 64  # of queries of each: those of a wgmma
_RING_BYTES = 128 * 1024
_WGMMA = plgpu.Layout.WGMMA


def unsupported(q: jax.Array, pages: KVPages) -> str | None:
    """Why `paged_prefill` refuses arrays of these shapes and dtypes, None if it does not."""
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
    if heads % kv_heads:
        return f"{heads} query heads cannot be shared evenly among {kv_heads} KV heads."
    return None


def paged_prefill(
    q: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    visible: Visible,
    *,
    scale: float,
    soft_cap: float | None = None,
    num_sms: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Partial attention of the tokens of all rows of `batch`, each to what is `visible` to it.

    q [tokens, query_heads, head_dim]; query head h reads KV head h // (query_heads / kv_heads).
    soft_cap: scores become soft_cap * tanh(scores / soft_cap). num_sms: blocks of threads, those
    of the device unless given. interpret: what `compat.gpu_interpreter` gives, to run on the host.

    A page id outside the pool is taken for the nearest one inside, and what is visible ends where
    the row's table does. Every position from the first that some token of a row sees to the last
    must have been written.

    Returns out [tokens, query_heads, head_dim] and lse [tokens, query_heads] float32; 0 and -inf
    for tokens that see nothing and for those of no row. A row's do not depend on the other rows.
    Raises ValueError for what `unsupported` names and for a scale that is not positive.
    """
    if reason := unsupported(q, pages):
        raise ValueError(f"Mosaic GPU paged_prefill: {reason}")
    if scale <= 0:
        raise ValueError(f"scale is {scale}; it must be positive.")
    tokens, heads, head_dim = q.shape
    kv_heads, page_size = pages.k.shape[1], pages.k.shape[3]
    packed = math.gcd(heads // kv_heads, 8)  # query heads of a unit
    span = _ROWS // packed  # tokens of one consumer
    size = _CONSUMERS * span
    padded = max(size, tokens + -tokens % ALIGNMENT)
    q = jnp.pad(q, ((0, padded - tokens), (0, 0), (0, 0)))
    work = work_list(
        batch,
        visible,
        size=size,
        tile=_tile_size(head_dim),
        end=padded,
        positions=batch.tables.shape[1] * page_size,
    )
    # A consumer's rows are `packed` heads of `span` tokens each.
    limits = work.limits.reshape(-1, 2, _CONSUMERS, span).swapaxes(1, 2)
    limits = jnp.tile(limits, (1, 1, 1, packed))
    kernel = _kernel(
        q,
        pages,
        capacity=len(limits),
        packed=packed,
        scale=scale,
        soft_cap=soft_cap,
        blocks=num_sms or compat.num_sms(),
        interpret=interpret,
    )
    out, lse = kernel(q, pages.k, pages.v, batch.tables, work.blocks, limits, work.count)

    def of_tokens(by_block):
        by_block = by_block.reshape(*by_block.shape[:3], packed, span, *by_block.shape[4:])
        consumer, offset = lax.div(work.offset, span), lax.rem(work.offset, span)
        taken = by_block[work.number, consumer, :, :, offset]
        return taken.reshape(tokens, heads, *by_block.shape[5:])

    sees = work.sees[:, None]
    out = jnp.where(sees[..., None], of_tokens(out), 0)
    return out, jnp.where(sees, of_tokens(lse), -jnp.inf)


def _tile_size(head_dim):
    """Positions that are attended to at once."""
    return 64 if head_dim == 256 else 128


def _kernel(q, pages, *, capacity, packed, scale, soft_cap, blocks, interpret):
    """From q, k, v, tables, blocks, limits [capacity, consumers, 2, rows] and their count [1] to
    out [capacity, consumers, groups, rows, dim] and lse without the last dimension."""
    _, heads, dim = q.shape
    num_pages, kv_heads, _, page_size = pages.k.shape
    groups = heads // packed
    span = _ROWS // packed
    tile_size = _tile_size(dim)
    piece = min(page_size, tile_size)  # positions of one copy, contiguous in a page
    pieces = tile_size // piece
    item_bytes = q.dtype.itemsize
    stages = _RING_BYTES // (2 * tile_size * dim * item_bytes)
    separate = dim < 256  # results have memory of their own, and else replace the queries
    # Found with the compiler: the most that the loader can spare without spilling.
    registers = (232, 40) if dim == 256 else (216, 72)
    in_layout = functools.partial(compat.in_layout, interpret=interpret)
    positions = functools.partial(compat.positions, layout=_WGMMA, interpret=interpret)

    def paged_prefill_kernel(q, k, v, tables, work, limits, count, out, lse, *scratch):
        q_tile, k_ring, v_ring, lse_tile, limit_tile, *scratch = scratch
        *barriers, out_tile = scratch if separate else (*scratch, q_tile)
        q_full, q_free, k_full, k_free, v_full, v_free, v_loaded, turn = barriers
        warpgroup = lax.axis_index("warpgroup")
        worker = lax.axis_index("block")

        def place(index):
            """This worker's in a round: every other round is dealt out backwards."""
            return jnp.where(lax.rem(index, 2) == 0, worker, blocks - 1 - worker)

        def own_units():
            units = count[0] * groups
            rounds = lax.div(units, blocks)
            return rounds + (place(rounds) < lax.rem(units, blocks)).astype(jnp.int32)

        def unit_of(index):
            unit = index * blocks + place(index)
            number = lax.div(unit, groups)
            block = Block(*(work[number, column] for column in range(len(Block._fields))))
            return number, lax.rem(unit, groups), block

        def slot_of(tile):
            return lax.rem(tile, stages)

        @pl.when(warpgroup < _CONSUMERS)
        def compute():
            plgpu.set_max_registers(registers[0], action="increase")
            for stage in range(stages):
                plgpu.barrier_arrive(k_free.at[stage])
                plgpu.barrier_arrive(v_free.at[stage])
            plgpu.barrier_arrive(q_free)

            def pass_turn():
                plgpu.barrier_arrive(turn.at[1 - warpgroup])

            pl.when(warpgroup == 1)(pass_turn)

            def attend(index, tiles_before):
                number, group, block = unit_of(index)

                def weigh(tile, scores, peak, total):
                    """One step of the online softmax, in octaves: its state and new weights."""

                    def masked(scores):
                        own = limit_tile.at[lax.rem(index, 2), warpgroup]
                        since, until = (in_layout(own[n], _WGMMA.reduce(1)) for n in range(2))
                        position = positions((_ROWS, tile_size), 1) + tile * tile_size
                        seen = position >= across(since, tile_size)
                        seen &= position < across(until, tile_size)
                        return jnp.where(seen, scores, MASKED)

                    if soft_cap is not None:
                        scores = soft_capped(scores, scale, soft_cap)
                    whole = (tile >= block.whole) & (tile < block.rest)
                    scores = lax.cond(whole, lambda scores: scores, masked, scores)
                    unit = LOG2E if soft_cap is not None else scale * LOG2E
                    new_peak = jnp.maximum(peak, jnp.max(scores, axis=1) * unit)
                    shrink = jnp.exp2(peak - new_peak)
                    weights = jnp.exp2(scores * unit - across(new_peak, tile_size))
                    total = total * shrink + jnp.sum(weights, axis=1)
                    return new_peak, total, shrink, weights.astype(q.dtype)

                def keys(slot):
                    return [k_ring.at[slot, n] for n in range(pieces)]

                def finish_keys(tile):
                    plgpu.barrier_arrive(k_free.at[slot_of(tiles_before + tile)])

                    if separate:

                        @pl.when(tile + 1 == block.tiles)
                        def _():
                            plgpu.barrier_arrive(q_free)

                def full(value, *columns):
                    layout = _WGMMA if columns else _WGMMA.reduce(1)
                    return in_layout(jnp.full((_ROWS, *columns), value, jnp.float32), layout)

                plgpu.barrier_wait(q_full.at[warpgroup])
                slot = slot_of(tiles_before)
                plgpu.barrier_wait(k_full.at[slot])
                plgpu.barrier_wait(turn.at[warpgroup])
                scores = wgmma_turns.products(q_tile.at[warpgroup], keys(slot), pass_turn)
                finish_keys(0)
                peak, total, _, weights = weigh(0, scores, full(MASKED), full(0))

                def fold(tile, carry):
                    peak, total, values, weights = carry
                    slot = slot_of(tiles_before + tile)
                    previous = slot_of(tiles_before + tile - 1)
                    plgpu.barrier_wait(k_full.at[slot])
                    plgpu.barrier_wait(v_full.at[previous])
                    plgpu.barrier_wait(turn.at[warpgroup])
                    scores, values = wgmma_turns.products_and_add_product(
                        q_tile.at[warpgroup],
                        keys(slot),
                        values,
                        weights,
                        v_ring.at[previous],
                        pass_turn,
                        interpret,
                    )
                    finish_keys(tile)
                    plgpu.barrier_arrive(v_free.at[previous])
                    peak, total, shrink, weights = weigh(tile, scores, peak, total)
                    values *= across(shrink, dim)
                    return lax.optimization_barrier((peak, total, values, weights))

                carry = peak, total, full(0, dim), weights
                peak, total, values, weights = lax.fori_loop(1, block.tiles, fold, carry)

                last = slot_of(tiles_before + block.tiles - 1)
                plgpu.barrier_wait(v_full.at[last])
                plgpu.barrier_wait(turn.at[warpgroup])
                values = wgmma_turns.add_product(
                    values, weights, v_ring.at[last], pass_turn, interpret
                )
                plgpu.barrier_arrive(v_free.at[last])

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous unit's results
                out_tile[warpgroup] = (values * across(1 / total, dim)).astype(q.dtype)
                lse_tile[warpgroup] = peak * (1 / LOG2E) + jnp.log(total)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_tile.at[warpgroup], out.at[number, warpgroup, group])
                plgpu.copy_smem_to_gmem(lse_tile.at[warpgroup], lse.at[number, warpgroup, group])
                if not separate:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    plgpu.barrier_arrive(q_free)
                return tiles_before + block.tiles

            lax.fori_loop(0, own_units(), attend, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

            @pl.when(warpgroup == 0)
            def _():
                plgpu.barrier_wait(turn.at[0])

        @pl.when(warpgroup == _CONSUMERS)
        def load():
            plgpu.set_max_registers(registers[1], action="decrease")

            def load_unit(index, tiles_before):
                number, group, block = unit_of(index)
                kv_head = lax.div(group * packed, heads // kv_heads)
                last_page = lax.div(block.until - 1, page_size)
                plgpu.barrier_wait(q_free)

                def load_queries(consumer, _):
                    source = limits.at[number, consumer]
                    target = limit_tile.at[lax.rem(index, 2), consumer]
                    plgpu.copy_gmem_to_smem(source, target, q_full.at[consumer])

                    def load_head(n, _):
                        own = pl.ds(pl.multiple_of(block.start + consumer * span, ALIGNMENT), span)
                        rows = pl.ds(pl.multiple_of(n * span, ALIGNMENT), span)
                        source = q.at[own, group * packed + n]
                        target = q_tile.at[consumer, rows]
                        plgpu.copy_gmem_to_smem(source, target, q_full.at[consumer])

                    lax.fori_loop(0, packed, load_head, None)

                lax.fori_loop(0, _CONSUMERS, load_queries, None)

                def load_tile(tile, _):
                    slot = slot_of(tiles_before + tile)
                    start = (block.first_tile + tile) * tile_size
                    offset = pl.multiple_of(lax.rem(start, page_size), piece)
                    # Read before waiting, so that their latency is not added to the wait. Beyond
                    # the last page that is seen, that page again: what it brings is masked.
                    ids = [
                        tables[block.row, jnp.minimum(lax.div(start, page_size) + n, last_page)]
                        for n in range(pieces)
                    ]
                    ids = [jnp.clip(page, 0, num_pages - 1) for page in ids]
                    plgpu.barrier_wait(k_free.at[slot])
                    for n, page in enumerate(ids):
                        source = k.at[page, kv_head, :, pl.ds(offset, piece)]
                        plgpu.copy_gmem_to_smem(source, k_ring.at[slot, n], k_full.at[slot])
                    plgpu.barrier_wait(v_free.at[slot])
                    whole = (start >= block.since) & (start + tile_size <= block.until)

                    def load_values(arrived):
                        for n, page in enumerate(ids):
                            source = v.at[page, kv_head, pl.ds(offset, piece)]
                            target = v_ring.at[slot, pl.ds(n * piece, piece)]
                            plgpu.copy_gmem_to_smem(source, target, arrived)

                    @pl.when(whole)
                    def _():
                        load_values(v_full.at[slot])

                    @pl.when(jnp.logical_not(whole))
                    def _():
                        load_values(v_loaded)
                        plgpu.barrier_wait(v_loaded)
                        zero_invisible(slot, start, block)
                        for _ in range(pieces):
                            plgpu.barrier_arrive(v_full.at[slot])

                lax.fori_loop(0, block.tiles, load_tile, None)
                return tiles_before + block.tiles

            def zero_invisible(slot, start, block):
                """What is not seen has no weight, but nothing times NaN would still be NaN."""

                def zero(part, _):
                    first = pl.multiple_of(lax.div(part, dim // 64) * 64, 64)
                    column = pl.multiple_of(lax.rem(part, dim // 64) * 64, 64)
                    position = positions((64, 64), 0) + (start + first)
                    seen = (position >= block.since) & (position < block.until)
                    values = v_ring.at[slot, pl.ds(first, 64), pl.ds(column, 64)]
                    value = in_layout(values[...], _WGMMA)
                    values[...] = jnp.where(seen, value, jnp.zeros_like(value))

                lax.fori_loop(0, tile_size // 64 * (dim // 64), zero, None)
                plgpu.commit_smem()

            lax.fori_loop(0, own_units(), load_unit, jnp.int32(0))
            plgpu.barrier_wait(q_free)
            for stage in range(stages):
                plgpu.barrier_wait(k_free.at[stage])
                plgpu.barrier_wait(v_free.at[stage])

    def tiled(columns):
        swizzle = min(columns * item_bytes, 128)
        tiling = plgpu.TilingTransform((8, swizzle // item_bytes))
        return tiling, plgpu.SwizzleTransform(swizzle)

    return plgpu.kernel(
        paged_prefill_kernel,
        out_type=(
            jax.ShapeDtypeStruct((capacity, _CONSUMERS, groups, _ROWS, dim), q.dtype),
            jax.ShapeDtypeStruct((capacity, _CONSUMERS, groups, _ROWS), jnp.float32),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=(
            # Operands of a wgmma share one swizzle, and keys lie along tokens.
            plgpu.SMEM((_CONSUMERS, _ROWS, dim), q.dtype, transforms=tiled(piece)),
            plgpu.SMEM((stages, pieces, dim, piece), q.dtype, transforms=tiled(piece)),
            plgpu.SMEM((stages, tile_size, dim), q.dtype, transforms=tiled(dim)),
            plgpu.SMEM((_CONSUMERS, _ROWS), jnp.float32),
            plgpu.SMEM((2, _CONSUMERS, 2, _ROWS), jnp.int32),
            plgpu.Barrier(num_barriers=_CONSUMERS, num_arrivals=packed + 1),
            plgpu.Barrier(num_arrivals=_CONSUMERS),
            plgpu.Barrier(num_barriers=stages, num_arrivals=pieces),
            plgpu.Barrier(num_barriers=stages, num_arrivals=_CONSUMERS),
            plgpu.Barrier(num_barriers=stages, num_arrivals=pieces),
            plgpu.Barrier(num_barriers=stages, num_arrivals=_CONSUMERS),
            plgpu.Barrier(num_arrivals=pieces),
            plgpu.Barrier(num_barriers=_CONSUMERS),
            *([plgpu.SMEM((_CONSUMERS, _ROWS, dim), q.dtype, transforms=tiled(dim))] * separate),
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # no reduction crosses warps
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        interpret=interpret,
    )
