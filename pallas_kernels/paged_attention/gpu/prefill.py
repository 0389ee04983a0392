"""Prefill attention over pages on Hopper GPUs: FlashAttention-3 on ragged rows, in Mosaic GPU.

A work unit is a block of consecutive tokens of one row and as many query heads of one KV head as
fill the rows of two wgmmas with them: both read the same keys and values. `prefill_work` lists the
blocks, longest first, the same for all layers of a step; one thread block per multiprocessor takes
every n-th unit, alternating direction from round to round, so that all finish together.

Three warpgroups run in parallel (FlashAttention-3, 2407.08608). One loads: queries, and the keys
and values of the row's pages, tile by tile into a ring in shared memory, units ahead of time. Two
compute, 64 rows of queries each, and take turns on the tensor cores: in its turn, one issues

    scores = queries @ keys of this tile,    values += weights @ values of the previous tile

and passes the turn on, so that the other's products are queued behind its own while it waits; then
it computes weights from the scores while the other's products run. The online softmax (1805.02867)
uses powers of two. Only tiles that some token of the block does not see in full are masked.

The loader, of `pages`, dequantizes pages and overwrites values that no token of the
block sees with zeros.

The tokens of a row begin anywhere, but a block begins at a multiple of 8, as copies to shared
memory require. Whole blocks of results are written, and XLA gathers each token's: it rewrites them
anyway, to join them with those of decodes and to zero those of no row.

Arithmetic behind the sizes (not measurements), for head_dim 128 and 2-byte elements, on an H200,
whose multiprocessors have 2048 multiply-adds a cycle in tensor cores and 16 exponentials:

- Rows: a unit has 128, so a tile of 128 positions takes 2 * 128 * 128 * 128 / 2048 = 2048 cycles
  and 64 KiB of loads, from the L2 cache mostly: 32 bytes per cycle. 64 rows would need 64.
- Tokens: with 4 query heads for each KV head, 128 rows are 32 tokens, so that short rows waste
  little. The packed heads are a power of two up to 8, which leaves 8 tokens per copy.
- Turns: one takes 1024 cycles. Between two, a warpgroup takes 512 cycles of exponentials and some
  360 of other operations on the 64 scores of each thread, which overlap in part.
- Registers: 64 for values, 64 for scores, 32 for weights and the rest temporary, of 216; 72 are
  left for the loader. With head_dim 256 a tile is 64 positions, and it is 128, 32 and 16 of 224:
  too many to leave the loader what it needs to dequantize pages.
- Shared memory: two stages of the ring are 128 KiB, queries and results 32 KiB each; of 227. With
  head_dim 256, results replace the queries.
- Operands: a wgmma's left operand from shared memory is 2 KiB for every 16 features, its right one
  32 bytes for each position. At 128 bytes per cycle, pages of 128 positions keep up easily (48
  cycles of 64), pages of 64 barely (32 of 32), and scores take 1.5 times as long with pages of 32
  and 2.5 times with pages of 16.

- Quantized pages: a tile needs a third slot of 32 KiB, where it lands. The loader executes some 500
  operations per thread for it, which fit beside those of the others. Shared memory moves more: 32
  KiB from copies, 32 and 64 to dequantize, 192 to the products: 2560 cycles with pages of 64, for
  what takes the tensor cores 2048. With scales of tokens, tiles are 64 positions: 32 registers of
  factors beside 128 positions' scores are more than there are.

A short chunk of a very long row is one unit per KV head, however long the row: few multiprocessors
work on it.
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
from pallas_kernels.paged_attention.gpu import pages as gpu_pages
from pallas_kernels.paged_attention.gpu import wgmma_turns
from pallas_kernels.paged_attention.gpu.hopper import LOG2E, MASKED, across, soft_capped
from pallas_kernels.paged_attention.gpu.pages import Loader, Ring, Seen, matrix
from pallas_kernels.paged_attention.gpu.prefill_work import ALIGNMENT, Block, work_list
from pallas_kernels.paged_attention.layout import KVPages, RaggedBatch, Visible

_CONSUMERS = 2  # warpgroups that compute
_ROWS = 64  # of queries of each: those of a wgmma
_RING_BYTES = 128 * 1024
_WGMMA = plgpu.Layout.WGMMA


def unsupported(q: jax.Array, pages: KVPages) -> str | None:
    """Why `paged_prefill` refuses arrays of these shapes and dtypes, None if it does not."""
    if reason := gpu_pages.unsupported(q, pages):
        return reason
    heads, kv_heads = q.shape[1], pages.k.shape[1]
    if pages.k.dtype != q.dtype and q.shape[2] > 128:
        return f"head_dim is {q.shape[2]}; with pages of {pages.k.dtype} it can be 64 or 128."
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
    """Partial attention of the tokens of all rows of `batch`, each over its `visible` range.

    q [tokens, query_heads, head_dim]; query head h reads KV head h // (query_heads / kv_heads).
    soft_cap: scores become soft_cap * tanh(scores / soft_cap). num_sms: thread blocks, by default
    the device's multiprocessors. interpret: what `compat.gpu_interpreter` gives, to run on the
    host.

    Page ids are clipped to the pool, and visible ranges to the capacity of a row's page table.
    Every position from the first to the last that any token of a row sees must have been written.

    Returns out [tokens, query_heads, head_dim] and lse [tokens, query_heads] float32; 0 and -inf
    for tokens that see nothing and those of no row. A row's result does not depend on other rows.
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
        tile=_tile_size(head_dim, pages.scales is not None),
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
    scales = () if pages.scales is None else (pages.scales,)
    out, lse = kernel(q, pages.k, pages.v, batch.tables, work.blocks, limits, work.count, *scales)

    def of_tokens(by_block):
        by_block = by_block.reshape(*by_block.shape[:3], packed, span, *by_block.shape[4:])
        consumer, offset = lax.div(work.offset, span), lax.rem(work.offset, span)
        taken = by_block[work.number, consumer, :, :, offset]
        return taken.reshape(tokens, heads, *by_block.shape[5:])

    sees = work.sees[:, None]
    out = jnp.where(sees[..., None], of_tokens(out), 0)
    return out, jnp.where(sees, of_tokens(lse), -jnp.inf)


def _tile_size(head_dim, scaled):
    """Positions that are attended to together: as many as there are registers for."""
    return 64 if head_dim == 256 or scaled else 128


def _kernel(q, pages, *, capacity, packed, scale, soft_cap, blocks, interpret):
    """From q, k, v, tables, blocks, limits [capacity, consumers, 2, rows] and their count [1] to
    out [capacity, consumers, groups, rows, dim] and lse without the last dimension."""
    _, heads, dim = q.shape
    num_pages, kv_heads, _, page_size = pages.k.shape
    groups = heads // packed
    span = _ROWS // packed
    tile_size = _tile_size(dim, pages.scales is not None)
    ring = Ring(
        num_pages=num_pages,
        page_size=page_size,
        head_dim=dim,
        stored=pages.k.dtype,
        dtype=q.dtype,
        tile=tile_size,
        stages=_RING_BYTES // (2 * tile_size * dim * q.dtype.itemsize),
        landings=int(pages.k.dtype != q.dtype),
        value_columns=dim,
        readers=_CONSUMERS,
        blanks=True,
        scaled=pages.scales is not None,
    )
    separate = dim < 256  # results have their own memory; otherwise they replace the queries
    # Found by compiling: the most that the loader can release without spilling.
    registers = (208, 88) if ring.packed else (224, 56) if dim == 256 else (216, 72)
    in_layout = functools.partial(compat.in_layout, interpret=interpret)
    positions = functools.partial(compat.positions, layout=_WGMMA, interpret=interpret)

    def paged_prefill_kernel(q, k, v, tables, work, limits, count, *others):
        scales, others = others[: ring.scaled], others[ring.scaled :]
        out, lse, q_tile, places, lse_tile, limit_tile, q_full, q_free, turn, *results = others
        (out_tile,) = results or (q_tile,)
        warpgroup = lax.axis_index("warpgroup")
        worker = lax.axis_index("block")

        def place(index):
            """This worker's position in a round: every other round is assigned in reverse."""
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

        @pl.when(warpgroup < _CONSUMERS)
        def compute():
            plgpu.set_max_registers(registers[0], action="increase")
            ring.free_all(places)
            plgpu.barrier_arrive(q_free)

            def pass_turn():
                plgpu.barrier_arrive(turn.at[1 - warpgroup])

            pl.when(warpgroup == 1)(pass_turn)

            def attend(index, tiles_before):
                number, group, block = unit_of(index)

                def factors(slot):
                    """Of a tile's scores or weights."""
                    pieces = ring.scales(places, slot, _ROWS, interpret)
                    return compat.side_by_side(pieces, _WGMMA, interpret)

                def weigh(tile, scores, peak, total):
                    """One step of the online softmax, in base 2: its state and new weights."""
                    if ring.scaled:
                        scale_slot = ring.scale_slot(tiles_before + tile)
                        scores *= factors(scale_slot)

                    def masked(scores):
                        own = limit_tile.at[warpgroup]
                        since, until = (in_layout(own[n], _WGMMA.reduce(1)) for n in range(2))
                        position = positions((_ROWS, tile_size), 1) + tile * tile_size
                        seen = position >= across(since, tile_size)
                        seen &= position < across(until, tile_size)
                        # Not MASKED: the compiler fuses the product with `unit` below with the
                        # subtraction of a peak that was rounded, which is then not 0.
                        return jnp.where(seen, scores, -jnp.inf)

                    if soft_cap is not None:
                        scores = soft_capped(scores, scale, soft_cap)
                    whole = (tile >= block.whole) & (tile < block.rest)
                    scores = lax.cond(whole, lambda scores: scores, masked, scores)
                    if separate:

                        @pl.when(tile + 1 == block.tiles)
                        def _():
                            plgpu.commit_smem()  # limits are read; TMA may overwrite them
                            plgpu.barrier_arrive(q_free)

                    unit = LOG2E if soft_cap is not None else scale * LOG2E
                    new_peak = jnp.maximum(peak, jnp.max(scores, axis=1) * unit)
                    shrink = jnp.exp2(peak - new_peak)
                    weights = jnp.exp2(scores * unit - across(new_peak, tile_size))
                    total = total * shrink + jnp.sum(weights, axis=1)
                    if ring.scaled:
                        weights *= factors(scale_slot + 1)
                    return new_peak, total, shrink, weights.astype(q.dtype)

                def keys(slot):
                    return [places.k.at[slot, n] for n in range(ring.pieces)]

                def full(value, *columns):
                    layout = _WGMMA if columns else _WGMMA.reduce(1)
                    return in_layout(jnp.full((_ROWS, *columns), value, jnp.float32), layout)

                plgpu.barrier_wait(q_full.at[warpgroup])
                slot = ring.slot(tiles_before)
                plgpu.barrier_wait(places.k_full.at[slot])
                plgpu.barrier_wait(turn.at[warpgroup])
                scores = wgmma_turns.products(q_tile.at[warpgroup], keys(slot), pass_turn)
                plgpu.barrier_arrive(places.k_free.at[slot])
                peak, total, _, weights = weigh(0, scores, full(MASKED), full(0))

                def fold(tile, carry):
                    peak, total, values, weights = carry
                    slot = ring.slot(tiles_before + tile)
                    previous = ring.slot(tiles_before + tile - 1)
                    plgpu.barrier_wait(places.k_full.at[slot])
                    plgpu.barrier_wait(places.v_full.at[previous])
                    plgpu.barrier_wait(turn.at[warpgroup])
                    scores, values = wgmma_turns.products_and_add_product(
                        q_tile.at[warpgroup],
                        keys(slot),
                        values,
                        weights,
                        places.v.at[previous],
                        pass_turn,
                        interpret,
                    )
                    plgpu.barrier_arrive(places.k_free.at[slot])
                    plgpu.barrier_arrive(places.v_free.at[previous])
                    peak, total, shrink, weights = weigh(tile, scores, peak, total)
                    values *= across(shrink, dim)
                    return lax.optimization_barrier((peak, total, values, weights))

                carry = peak, total, full(0, dim), weights
                peak, total, values, weights = lax.fori_loop(1, block.tiles, fold, carry)

                last = ring.slot(tiles_before + block.tiles - 1)
                plgpu.barrier_wait(places.v_full.at[last])
                plgpu.barrier_wait(turn.at[warpgroup])
                values = wgmma_turns.add_product(
                    values, weights, places.v.at[last], pass_turn, interpret
                )
                plgpu.barrier_arrive(places.v_free.at[last])

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

            loader = Loader(ring, places, k, v, tables, interpret, 0, *scales)

            def load_queries(index):
                number, group, block = unit_of(index)
                plgpu.barrier_wait(q_free)

                def load_rows(consumer, _):
                    source = limits.at[number, consumer]
                    target = limit_tile.at[consumer]
                    plgpu.copy_gmem_to_smem(source, target, q_full.at[consumer])

                    def load_head(n, _):
                        own = pl.ds(pl.multiple_of(block.start + consumer * span, ALIGNMENT), span)
                        rows = pl.ds(pl.multiple_of(n * span, ALIGNMENT), span)
                        source = q.at[own, group * packed + n]
                        target = q_tile.at[consumer, rows]
                        plgpu.copy_gmem_to_smem(source, target, q_full.at[consumer])

                    lax.fori_loop(0, packed, load_head, None)

                lax.fori_loop(0, _CONSUMERS, load_rows, None)

            def load_unit(index, carry):
                tiles_before, latest = carry
                _, group, block = unit_of(index)
                kv_head = lax.div(group * packed, heads // kv_heads)
                if not ring.packed:
                    load_queries(index)

                def load_tile(tile, latest):
                    start = (block.first_tile + tile) * tile_size
                    seen = Seen(block.since - start, block.until - start)
                    number = tiles_before + tile
                    loader.load(number, block.row, kv_head, start, seen, latest)
                    if ring.packed:
                        # Not before: the previous unit needs its queries until its last tile has
                        # been dequantized.
                        pl.when(tile == 0)(lambda: load_queries(index))
                    return seen if ring.packed else None

                latest = lax.fori_loop(0, block.tiles, load_tile, latest)
                return tiles_before + block.tiles, latest

            latest = Seen(jnp.int32(0), jnp.int32(0)) if ring.packed else None
            done = lax.fori_loop(0, own_units(), load_unit, (jnp.int32(0), latest))
            loader.finish(*done)
            plgpu.barrier_wait(q_free)

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
            # Operands of a wgmma share one swizzle, and keys are contiguous along tokens.
            matrix(_CONSUMERS, _ROWS, dim, columns=ring.piece, dtype=q.dtype),
            ring.scratch,
            plgpu.SMEM((_CONSUMERS, _ROWS), jnp.float32),
            plgpu.SMEM((_CONSUMERS, 2, _ROWS), jnp.int32),
            plgpu.Barrier(num_barriers=_CONSUMERS, num_arrivals=packed + 1),
            plgpu.Barrier(num_arrivals=_CONSUMERS),
            plgpu.Barrier(num_barriers=_CONSUMERS),
            *([matrix(_CONSUMERS, _ROWS, dim, columns=dim, dtype=q.dtype)] * separate),
        ),
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=0,  # no reduction crosses warps
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        ),
        interpret=interpret,
    )
