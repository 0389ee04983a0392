"""Quantized matmuls on Hopper GPUs, in Mosaic GPU.

One kernel for a few tokens and for many. A tile of the result is 256 outputs by 16 to 128 tokens.
In a thread block one warpgroup issues loads into a ring in shared memory; four others each compute
64 of the outputs: they read quantized values from the ring into registers, dequantize them there in
the dtype of x, and feed them from registers to the tensor cores, which take x from shared memory.
The weight is the left operand, so few tokens make a narrow product and not a padded one.
Dequantized values are never written to memory.

Even and odd inputs are separate operands, because of the byte layout in registers (see
`mosaic_gpu_unpack`): x comes with its tokens last, and its even inputs are loaded before its odd
ones.

Work is divided by stream-K (Osama et al. 2023): all steps along the inputs of all tiles, in order,
are cut into equal runs, one per thread block. A tile that several blocks share is the sum of their
parts, which XLA adds in a fixed order, in the fusion that uses the result. With many tiles, whole
tiles are assigned instead. The division depends on shapes alone: no result depends on timing, and
no token's result on the other tokens.

Group scales are rounded to the dtype of x, and so are scaled values; a minimum is added to them.
Row scales are applied by XLA, in float32, after the sum. For float8 activations both operands go
from shared memory to the tensor cores, whose float8 sums keep fewer bits than float32: after each
step they are added to a float32 total.

Arithmetic behind the sizes (not measurements), for int4 in groups of 32 with float16 scales on an
H200 (132 multiprocessors, 1.755 GHz, 4.8 TB/s, thus 20.7 bytes per cycle and multiprocessor):

- Few tokens. A step is 256 outputs by 256 inputs: 32 KiB of values, 4 KiB of scales, and 8 KiB of
  x, which comes from the L2 cache. The ring holds five: at least 144 KiB are in flight, where 36
  would suffice for a latency of 1 us. At full bandwidth a step arrives every 1780 cycles.
  Dequantizing takes 4 instructions for two values, 256 for the 128 of a thread, and some 120 go to
  scales, barriers and addresses: for the four warps of each scheduler 1500 issue slots. The tensor
  cores need 16 * 4 products of at most 16 cycles, 1024.
- Outputs in a tile: x is read again for every 256 of them, 32 bytes against 144 of weight for each
  input. With 64 outputs, x would be as much as the weight, more than the L2 bandwidth.
- Parts: 4096 outputs of 14336 inputs are 16 tiles of 56 steps: 128 blocks of 7 steps, 8 parts per
  tile. A block writes 16 KiB for 252 KiB that it reads.
- Many tokens. A tile of 128 takes 16 tensor core cycles for each input, in which 256 bytes of x and
  144 of weight must come from the L2 cache: 25 per cycle, about its bandwidth. While one warpgroup
  dequantizes, the other three multiply.
- Registers: five warpgroups share 65,536, thus 96 per thread at launch. For 128 tokens the loader
  keeps 32 and the others take 112: 64 for sums, 16 for an operand, 8 for quantized values.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import gpu as compat
from pallas_kernels.quantized_matmul.mosaic_gpu_unpack import PACKED, unpack
from pallas_kernels.quantized_matmul.stream_k import Shares

if TYPE_CHECKING:
    from pallas_kernels.quantized_matmul.formats import QuantizedWeight

GROUPS = (32, 64, 128)
"""Supported group sizes, in addition to whole rows."""

ROWS = 64
"""Outputs per warpgroup: the rows of a wgmma."""

_WIDE = ("bfloat16", "float16")
_FP8 = "float8_e4m3fn"
_SMEM_BYTES = 225 * 1024  # of the 227 KiB of a multiprocessor's blocks, for barriers
_WGMMA = plgpu.Layout.WGMMA


class Tiling(NamedTuple):
    """Sizes of a tile and of a step along its inputs."""

    warpgroups: int  # that compute, ROWS outputs each
    tokens: int
    inputs: int  # of a step
    width: int  # of a left operand: half of twice as many inputs
    slots: int  # of the ring, a step each
    blocks_per_sm: int


def unsupported(weight: QuantizedWeight, x: jax.Array) -> str | None:
    """Why `quantized_matmul` refuses arrays of these shapes and dtypes, None if it does not."""
    format, (num_outputs, num_inputs) = weight.format, weight.shape
    takes = (*_WIDE, _FP8) if format.values == _FP8 and format.group_size is None else _WIDE
    if x.dtype.name not in takes:
        return f"x is {x.dtype}; for {format} it can be one of {', '.join(takes)}."
    if format.group_size not in (None, *GROUPS):
        return f"groups are of {format.group_size} inputs; they can be of {GROUPS} or whole rows."
    if num_outputs % ROWS:
        return f"the weight has {num_outputs} outputs; they can be any multiple of {ROWS}."
    multiple = 64 if format.values == "int4" else 32
    if num_inputs % multiple:
        return (
            f"the weight has {num_inputs} inputs; for {format.values} they can be any multiple "
            f"of {multiple}."
        )
    return None


def quantized_matmul(
    weight: QuantizedWeight, x: jax.Array, *, num_sms: int | None = None, interpret: Any = None
) -> jax.Array:
    """Float32 [tokens, out] of `weight` [out, in] and x [tokens, in], bfloat16 or float16.

    Or float8_e4m3fn, for weights of that dtype with one scale per output. num_sms: multiprocessors
    to divide the work among, by default those of the device. interpret: what
    `compat.gpu_interpreter` gives, to run on the host.

    Raises ValueError for what `unsupported` names.
    """
    if reason := unsupported(weight, x):
        raise ValueError(f"Mosaic GPU quantized_matmul: {reason}")
    tokens = len(x)
    tiling = _tiling(weight, x)
    x = jnp.pad(x, ((0, -tokens % tiling.tokens), (0, 0)))
    by_row = weight.format.group_size is None
    planes = () if by_row else _aligned_planes(weight, tiling)
    y = _product(weight, planes, x, tiling, num_sms or compat.num_sms(), interpret)
    y, x = y[:tokens], x[:tokens]
    if by_row:
        y *= weight.scales[:, 0].astype(jnp.float32)
        if weight.minima is not None:
            middles = _middles(weight.format, weight.scales, weight.minima)[:, 0]
            y += middles * jnp.sum(x, axis=1, keepdims=True, dtype=jnp.float32)
    return y


def _tiling(weight, x):
    """The Tiling for these shapes: as many outputs as fit, and all tokens up to 128."""
    num_outputs, num_inputs = weight.shape
    float8 = x.dtype.name == _FP8
    widest = 64 if float8 else 128  # sums are kept twice for float8
    tokens = min(widest, max(16, 1 << (len(x) - 1).bit_length()))
    warpgroups = next(n for n in (4, 3, 2, 1) if num_outputs % (ROWS * n) == 0)
    blocks_per_sm = min(3, 4 // warpgroups) if tokens <= 32 else 1
    rows, per_byte = ROWS * warpgroups, _values_per_byte(weight)
    most = 128 if tokens <= 32 or float8 else 64
    columns = next(n for n in (128, 64, 32) if n <= most and num_inputs % (n * per_byte) == 0)
    inputs = columns * per_byte
    step_bytes = rows * columns + inputs * tokens * x.dtype.itemsize
    if weight.format.group_size is not None:
        scale_bytes = _scales_of_step(weight, inputs) * weight.scales.dtype.itemsize
        step_bytes += rows * scale_bytes * (1 if weight.minima is None else 2)
    slots = min(8, _SMEM_BYTES // blocks_per_sm // step_bytes)
    # Minima need registers too, and with 128 tokens sums take most of them.
    width = min(inputs // 2, 32 if tokens == 128 and weight.minima is not None else 64)
    return Tiling(warpgroups, tokens, inputs, width, slots, blocks_per_sm)


def _values_per_byte(weight):
    return 2 if weight.format.values == "int4" else 1


def _scales_of_step(weight, inputs):
    """Scales per row that a step loads: those of its inputs, at least 16 bytes."""
    return max(16 // weight.scales.dtype.itemsize, inputs // weight.format.group_size)


def _aligned_planes(weight, tiling):
    """Scales, and minima if any, with rows padded to whole loads."""
    scales = _scales_of_step(weight, tiling.inputs)
    planes = (weight.scales,) if weight.minima is None else (weight.scales, weight.minima)
    return [jnp.pad(plane, ((0, 0), (0, -plane.shape[1] % scales))) for plane in planes]


def _middles(format, scales, minima):
    """Float32 weights at the middle of the value range: `unpack` returns offsets from it."""
    middle = 8 if format.values == "int4" else 128
    return minima.astype(jnp.float32) + scales.astype(jnp.float32) * middle


def _product(weight, planes, x, tiling, num_sms, interpret):
    """Float32 [padded tokens, out] of x [padded tokens, in], before row scales."""
    num_outputs, num_inputs = weight.shape
    rows = ROWS * tiling.warpgroups
    padded = len(x)
    row_tiles, token_tiles = num_outputs // rows, padded // tiling.tokens
    shares = Shares.of(
        row_tiles * token_tiles, num_inputs // tiling.inputs, num_sms * tiling.blocks_per_sm
    )
    parts = shares.parts()
    kernel = _kernel(weight, planes, x.dtype, tiling, shares, token_tiles, parts.max(), interpret)
    x = x if x.dtype.name == _FP8 else x.T.reshape(-1, 2, padded)
    y = kernel(weight.values, *planes, x)
    y = y.reshape(-1, row_tiles, rows, token_tiles, tiling.tokens)
    if len(y) > 1:
        # Parts that no block computes are uninitialised memory.
        written = np.arange(len(y))[:, None, None] < parts.reshape(row_tiles, token_tiles)
        y = jnp.where(written[:, :, None, :, None], y, 0)
    return jnp.sum(y, axis=0).reshape(num_outputs, padded).T


def _kernel(weight, planes, dtype, tiling, shares, token_tiles, parts, interpret):
    """From values, planes and x to [parts, out, tokens].

    x is [in / 2, 2, tokens] for even and odd inputs; or [tokens, in] in float8, the only layout
    that the tensor cores take for it.
    """
    warpgroups, tokens, inputs, width, slots, _ = tiling
    format, per_byte = weight.format, _values_per_byte(weight)
    rows, columns = ROWS * warpgroups, inputs // per_byte
    float8 = dtype == _FP8
    scales = _scales_of_step(weight, inputs) if planes else 0
    # Registers: with 128 tokens most of them hold sums.
    operands_at_once = 2 if tokens <= 64 else 64 // width
    in_layout = functools.partial(compat.in_layout, interpret=interpret)

    def quantized_matmul_kernel(values, *refs):
        *plane_refs, x, out = refs[: len(planes) + 2]
        value_ring, x_ring, *plane_rings, full, free = refs[len(planes) + 2 :]
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")

        def each_slot(act):
            # A loop: unrolled, all barrier addresses would occupy registers to the end.
            lax.fori_loop(0, slots, lambda slot, _: act(free.at[slot]), None)

        @pl.when(warpgroup < warpgroups)
        def compute():
            if warpgroups == 4 and tokens == 128:
                plgpu.set_max_registers(112, action="increase")
            own_rows = pl.ds(pl.multiple_of(warpgroup * ROWS, ROWS), ROWS)
            each_slot(plgpu.barrier_arrive)

            def add_step(slot, step, total):
                if float8:
                    return total + compat.product_of_rows(
                        value_ring.at[slot, own_rows], x_ring.at[slot], interpret
                    )
                packed = in_layout(value_ring[slot, own_rows], PACKED)
                operands = [
                    (start, odd) for start in range(0, inputs // 2, width) for odd in (0, 1)
                ]
                for first in range(0, len(operands), operands_at_once):
                    lefts, rights = [], []
                    for start, odd in operands[first : first + operands_at_once]:
                        column = start * 2 // per_byte
                        part = packed[:, column : column + width * 2 // per_byte]
                        part = unpack(part, odd, format, dtype, interpret)
                        lefts.append(scaled(slot, step, start, part))
                        rights.append(x_ring.at[slot, odd, pl.ds(start, width)])
                    total = compat.add_products(total, lefts, rights, interpret)
                return total

            def scaled(slot, step, start, part):
                """Even or odd inputs from the `start`-th of a step on, scaled by group."""
                if not planes:
                    return part
                pieces = []
                for offset in range(0, width, format.group_size // 2):
                    piece = part[:, offset : offset + format.group_size // 2]
                    group = group_of(step, 2 * (start + offset))
                    scale, *minimum = (
                        in_layout(ring[slot, own_rows, group], _WGMMA.reduce(1))
                        for ring in plane_rings
                    )
                    piece *= across(scale, piece.shape[1])
                    if minimum:
                        piece += across(_middles(format, scale, *minimum), piece.shape[1])
                    pieces.append(piece)
                return compat.side_by_side(pieces, _WGMMA, interpret)

            def group_of(step, start):
                """Index among the loaded scales of the scale of a step's input `start`."""
                if inputs // format.group_size == scales:
                    return start // format.group_size
                return lax.rem(lax.div(step * inputs + start, format.group_size), scales)

            def across(per_row, count):
                return lax.broadcast_in_dim(per_row.astype(dtype), (ROWS, count), (0,))

            def sum_tile(index, steps_before):
                tile, part, first, count = shares.tile_of(block, index)

                def add(n, total):
                    slot = lax.rem(steps_before + n, slots)
                    plgpu.barrier_wait(full.at[slot])
                    total = add_step(slot, first + n, total)
                    plgpu.barrier_arrive(free.at[slot])
                    return total

                total = in_layout(jnp.zeros((ROWS, tokens), jnp.float32), _WGMMA)
                total = lax.fori_loop(0, count, add, total)
                row = lax.div(tile, token_tiles) * rows + warpgroup * ROWS
                column = lax.rem(tile, token_tiles) * tokens
                out[part, pl.ds(row, ROWS), pl.ds(column, tokens)] = total
                return steps_before + count

            lax.fori_loop(0, shares.tiles_of(block), sum_tile, jnp.int32(0))

        @pl.when(warpgroup >= warpgroups)
        def load():
            if warpgroups == 4 and tokens == 128:
                plgpu.set_max_registers(32, action="decrease")

            def load_tile(index, steps_before):
                tile, _, first, count = shares.tile_of(block, index)
                own_rows = pl.ds(lax.div(tile, token_tiles) * rows, rows)
                own_tokens = pl.ds(lax.rem(tile, token_tiles) * tokens, tokens)

                def load_step(n, _):
                    step = first + n
                    slot = lax.rem(steps_before + n, slots)
                    plgpu.barrier_wait(free.at[slot])

                    def copy(source, target):
                        plgpu.copy_gmem_to_smem(source, target, full.at[slot])

                    copy(values.at[own_rows, pl.ds(step * columns, columns)], value_ring.at[slot])
                    for plane, ring in zip(plane_refs, plane_rings):
                        first_scale = lax.div(step * inputs, format.group_size * scales) * scales
                        copy(plane.at[own_rows, pl.ds(first_scale, scales)], ring.at[slot])
                    if float8:
                        copy(x.at[own_tokens, pl.ds(step * inputs, inputs)], x_ring.at[slot])
                        return
                    half = pl.ds(step * (inputs // 2), inputs // 2)
                    for odd in (0, 1):
                        copy(x.at[half, odd, own_tokens], x_ring.at[slot, odd])

                lax.fori_loop(0, count, load_step, None)
                return steps_before + count

            lax.fori_loop(0, shares.tiles_of(block), load_tile, jnp.int32(0))
            each_slot(plgpu.barrier_wait)

    def tiled(minor, itemsize):
        return plgpu.TilingTransform((8, minor)), plgpu.SwizzleTransform(minor * itemsize)

    x_shape = (tokens, inputs) if float8 else (2, inputs // 2, tokens)
    x_minor = inputs if float8 else min(tokens, width)
    arrivals = 1 + len(planes) + (1 if float8 else 2)
    return plgpu.kernel(
        quantized_matmul_kernel,
        out_type=jax.ShapeDtypeStruct((parts, weight.shape[0], token_tiles * tokens), jnp.float32),
        grid=(shares.blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM((slots, rows, columns), weight.values.dtype, transforms=tiled(columns, 1)),
            plgpu.SMEM((slots, *x_shape), dtype, transforms=tiled(x_minor, dtype.itemsize)),
            *(plgpu.SMEM((slots, rows, scales), plane.dtype) for plane in planes),
            plgpu.Barrier(num_barriers=slots, num_arrivals=arrivals),
            plgpu.Barrier(num_barriers=slots, num_arrivals=warpgroups),
        ),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        interpret=interpret,
    )
