"""Quantized matmuls on TPUs: the weight is read from memory once, quantized.

    x [tokens, in] -> [parts, tokens, columns]                  plain XLA, outside
    for each tile of rows, of tokens, of columns:               the grid, copies double-buffered
        for each block of BLOCK_ROWS x BLOCK_COLUMNS:
            dequantize to the dtype of the product, with scales vector unit
            result [tokens, rows] += x . block^T                matrix unit
    result, times the scales of whole rows, plus minima         plain XLA, fused

A column is a byte of a row's values. In int4 it is two inputs, one in its
low half and one in its high, so x comes in two parts and nothing is reordered: both halves are
multiplied by their own inputs, and share a scale.

A scale belongs to 2**n columns. A gather along lanes, which has a unit of its own, spreads it, and
it is multiplied into the weight before the weight is rounded to the dtype of the product. Row
scales are applied after the product, so that integers and float8s are multiplied exactly. So are
minima: they contribute minima . (sums of x over groups), a product of 1/group of the size, and the
remaining weight to be rounded is smaller.

Tiles may reach beyond the weight, where memory is undefined. Result rows there are dropped. Columns
there are multiplied by zeros of x; their scales are the last group's, and float8 values, which
might be NaN, are set to zero.

Sizes are arithmetic and not measurements. Every grid step has a fixed cost: for few tokens a tile
is 2 MiB of values, which a v6e reads in 1.3 us. For many it is smaller, to leave room for x and the
result: an element of x is used for 512 rows, two operations each, which at two bytes per element is
512 operations per byte, where a v5e needs 240 and a v6e 560 to be bound by its matrix unit; and a
weight is dequantized once for 512 tokens. All buffers of a step together are below 12 MiB. The cost
of gathering scales next to the reads has not been measured on a TPU.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantized_matmul.formats import INT4_BLOCK, QuantizedWeight

FEW_TOKENS = 128
FEW_TILE, MANY_TILE = (1024, 2048), (512, 1024)
"""Rows and columns of a tile for up to FEW_TOKENS and for more."""
TOKEN_TILE = 512
BLOCK_ROWS, BLOCK_COLUMNS = 256, 512
LANES = 128
MIN_COLUMNS = 16
"""Fewest columns of a group, so that a tile's scales fit in 128 lanes."""

_X_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")


def unsupported(weight: QuantizedWeight, x: jax.Array) -> str | None:
    """Why the kernel refuses arguments of these shapes and dtypes, None if it does not."""
    if x.dtype.name not in _X_DTYPES:
        return f"x is {x.dtype}; it can be {', '.join(_X_DTYPES)}."
    if 0 in (*weight.shape, *x.shape):
        return f"a weight {list(weight.shape)} times x {list(x.shape)} is empty."
    if weight.format.group_size is not None:
        columns = _group_columns(weight)
        if columns < MIN_COLUMNS or columns & (columns - 1):
            least = weight.format.group_size // columns * MIN_COLUMNS
            return (
                f"groups are of {weight.format.group_size} inputs; of {weight.format.values} they "
                f"can be of {least} times a power of two, or a whole row."
            )
    return None


def quantized_matmul(weight: QuantizedWeight, x: jax.Array, *, interpret: Any = None) -> jax.Array:
    """Float32 [tokens, out] of `weight` [out, in] and x [tokens, in].

    Products are bfloat16 if x is bfloat16 or float8, else float32. Scales and minima must be
    finite. Raises ValueError for what `unsupported` names.
    """
    if reason := unsupported(weight, x):
        raise ValueError(reason)
    dtype = jnp.bfloat16 if x.dtype.itemsize == 1 else jnp.promote_types(x.dtype, jnp.bfloat16)
    x = x.astype(dtype)
    result = _multiply(weight, _parts(weight, x), interpret)
    if weight.format.group_size is None:
        result = result * weight.scales[:, 0].astype(jnp.float32)
    if weight.minima is not None:
        result = result + _of_minima(weight, x)
    return result


def _parts(weight, x):
    """[parts, tokens, columns] of x [tokens, in]: for int4 the inputs of low and high halves."""
    if weight.format.values != "int4":
        return x[None]
    blocks = x.reshape(len(x), -1, 2, INT4_BLOCK // 2)
    return blocks.transpose(2, 0, 1, 3).reshape(2, len(x), -1)


def _of_minima(weight, x):
    """Float32 [tokens, out]: contribution of the minima."""
    groups = weight.minima.shape[1]
    sums = x.astype(jnp.float32).reshape(len(x), groups, -1).sum(2)
    minima = weight.minima.astype(jnp.float32)
    return lax.dot_general(sums, minima, (((1,), (1,)), ((), ())), precision="highest")


def _multiply(weight, x, interpret):
    """Float32 [tokens, out] of x [parts, tokens, columns], before row scales."""
    parts, tokens, columns = x.shape
    num_rows = weight.shape[0]
    largest = FEW_TILE if tokens <= FEW_TOKENS else MANY_TILE
    tile_rows = min(largest[0], _round_up(num_rows, BLOCK_ROWS))
    tile_columns = min(largest[1], _round_up(columns, BLOCK_COLUMNS))
    tile_tokens = min(TOKEN_TILE, tokens)
    grid = tuple(map(pl.cdiv, (num_rows, tokens, columns), (tile_rows, tile_tokens, tile_columns)))
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -columns % BLOCK_COLUMNS)))

    operands = [x, weight.values]
    specs = [
        pl.BlockSpec((parts, tile_tokens, tile_columns), lambda row, token, at: (0, token, at)),
        pl.BlockSpec((tile_rows, tile_columns), lambda row, token, at: (row, at)),
    ]
    if weight.format.group_size is not None:
        operands.append(_loadable(weight.scales))
        tiles_a_block = max(1, LANES * _group_columns(weight) // tile_columns)
        lanes = min(LANES, weight.scales.shape[1])
        specs.append(
            pl.BlockSpec((tile_rows, lanes), lambda row, token, at: (row, at // tiles_a_block))
        )
    varying = [jax.typeof(operand).manual_axis_type.varying for operand in operands]
    return pl.pallas_call(
        functools.partial(_kernel, weight=jax.eval_shape(lambda: weight)),
        out_shape=jax.ShapeDtypeStruct(
            (tokens, num_rows),
            jnp.float32,
            manual_axis_type=jax.sharding.ManualAxisType(varying=frozenset().union(*varying)),
        ),
        grid=grid,
        in_specs=specs,
        out_specs=pl.BlockSpec((tile_tokens, tile_rows), lambda row, token, at: (token, row)),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * parts * tokens * columns * num_rows,
            bytes_accessed=sum(operand.nbytes for operand in operands) + 4 * tokens * num_rows,
            transcendentals=0,
        ),
        name="quantized_matmul",
        interpret=interpret or False,
    )(*operands)


def _kernel(x, values, *scales_and_result, weight):
    """One tile: x [parts, tokens, columns], values [rows, columns], scales [rows, lanes] if any."""
    *scales, result = scales_and_result
    first_row, first_column = pl.program_id(0) * values.shape[0], pl.program_id(2) * values.shape[1]

    @pl.when(first_column == 0)
    def _():
        result[...] = jnp.zeros(result.shape, result.dtype)

    # The last tiles may reach beyond the weight by whole blocks.
    num_rows, num_columns = weight.values.shape
    row_blocks = _blocks_within(values.shape[0], BLOCK_ROWS, num_rows - first_row)
    column_blocks = _blocks_within(values.shape[1], BLOCK_COLUMNS, num_columns - first_column)

    def multiply_block(row_block, column_block):
        rows = pl.ds(pl.multiple_of(row_block * BLOCK_ROWS, BLOCK_ROWS), BLOCK_ROWS)
        columns = pl.ds(pl.multiple_of(column_block * BLOCK_COLUMNS, BLOCK_COLUMNS), BLOCK_COLUMNS)
        first = first_column + column_block * BLOCK_COLUMNS
        scale = _spread(scales[0][rows, :], first, weight) if scales else None
        for part, half in enumerate(_unpack(values[rows, columns], first, weight)):
            half = half if scale is None else half * scale
            result[:, rows] += lax.dot_general(
                x[part, :, columns],
                half.astype(x.dtype),
                (((1,), (1,)), ((), ())),
                precision="highest" if x.dtype == jnp.float32 else None,
                preferred_element_type=jnp.float32,
            )

    @pl.loop(0, row_blocks)
    def _(row_block):
        @pl.loop(0, column_blocks)
        def _(column_block):
            multiply_block(row_block, column_block)


def _blocks_within(tile, block, remaining):
    """Blocks of a tile that contain any of the `remaining` rows or columns."""
    return jnp.minimum(tile // block, pl.cdiv(remaining, block))


def _unpack(values, first_column, weight):
    """Float32 [rows, columns] of a block of values; for int4 two, of low and of high halves."""
    if weight.format.values == "int4":
        values = values.astype(jnp.int32)
        offset = 0 if weight.format.minimum else 8
        return [(half - offset).astype(jnp.float32) for half in (values & 15, values >> 4)]
    values = values.astype(jnp.float32)
    columns = weight.values.shape[1]
    if weight.format.values == "float8_e4m3fn" and columns % BLOCK_COLUMNS:
        at = first_column + lax.broadcasted_iota(jnp.int32, values.shape, 1)
        values = jnp.where(at < columns, values, 0)
    return [values]


def _spread(scales, first_column, weight):
    """Float32 [rows, BLOCK_COLUMNS] of scales [rows, lanes]: of each column from `first_column`."""
    scales = _as_float32(scales)
    size = _group_columns(weight)
    shape = scales.shape[0], LANES
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    first_group = first_column // (size * LANES) * LANES  # of the loaded scales
    last_group = weight.scales.shape[1] - 1
    spread = []
    for first_lane in range(0, BLOCK_COLUMNS, LANES):
        group = jnp.minimum((first_column + first_lane + lane) // size, last_group) - first_group
        spread.append(jnp.take_along_axis(scales, group, axis=1, mode="promise_in_bounds"))
    return jnp.concatenate(spread, axis=1)


def _loadable(scales):
    """Float16 as its bits: the vector unit cannot load float16."""
    return lax.bitcast_convert_type(scales, jnp.uint16) if scales.dtype == jnp.float16 else scales


def _as_float32(scales):
    """Exact conversion, of float16 from its bits.

    The magnitude is shifted to its float32 place, and the exponent biases, 15 and 127, corrected.
    Below 2**-14 float16 has no leading one: it is added as a bit and subtracted as a number.
    """
    if scales.dtype != jnp.uint16:
        return scales.astype(jnp.float32)
    bits = scales.astype(jnp.int32)
    moved = ((bits & 0x7FFF) << 13) + (112 << 23)
    small = _float_of(moved + (1 << 23)) - 2.0**-14
    magnitude = jnp.where((bits & 0x7C00) == 0, small, _float_of(moved))
    return jnp.where((bits & 0x8000) == 0, magnitude, -magnitude)


def _float_of(bits):
    return lax.bitcast_convert_type(bits, jnp.float32)


def _group_columns(weight):
    return weight.format.group_size // (2 if weight.format.values == "int4" else 1)


def _round_up(number, multiple):
    return pl.cdiv(number, multiple) * multiple
