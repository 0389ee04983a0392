"""Quantized matmuls in plain XLA.

On CPUs, a few rows at a time: a tile of the weight is dequantized to float32 and multiplied while
it is in the cache, with the tokens in columns (docs/decisions/013-token-major.md). Dequantizing the
whole weight first writes and reads float32 memory, eight times the size of int4: for 49152 rows of
576 and one token, 13 times slower in Q8_0. Four-bit values are never reordered: low and high halves
of bytes are multiplied by their own inputs. Interleaving the halves of a tile first makes this 19
times slower in Q4_1.

Elsewhere the whole weight is dequantized, in the dtype of x, and the compiler may fuse it: chosen
by reasoning and not by measurement.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import as_bits
from pallas_kernels.platforms import by_platform
from pallas_kernels.quantized_matmul.formats import (
    INT4_BLOCK,
    QuantizedWeight,
    dequantize,
    nibbles,
    scaled,
)

# Dequantized values of a tile. For a few tokens 256 KiB, which stay in a core's private cache: for
# one token and 576 rows of 1536 they take two thirds of the time of 2 MiB. For more tokens 2 MiB:
# with 512 tokens, the smaller tiles take 1.5 times as long.
TILE, LARGE_TILE = 1 << 16, 1 << 19
FEW_TOKENS = 64


def quantized_matmul(weight: QuantizedWeight, x):
    """Float32 [tokens, out]."""
    return by_platform(weight, x, cpu=multiply_by_tile, default=multiply_whole)


def multiply_by_tile(weight: QuantizedWeight, x):
    """Tiles of about TILE or LARGE_TILE values each; the last has the remaining rows."""
    (num_outputs, num_inputs), tokens = weight.shape, len(x)
    size = TILE if tokens <= FEW_TOKENS else LARGE_TILE
    rows = min(num_outputs, max(16, size // num_inputs // 16 * 16))
    x = x.astype(jnp.float32).T
    parts = (x,)
    if weight.format.values == "int4":
        blocks = x.reshape(-1, 2, INT4_BLOCK // 2, tokens)
        parts = [blocks[:, half].reshape(-1, tokens) for half in (0, 1)]

    def tile(first, rows=rows):
        return _multiply(_rows(weight, first, rows), parts)

    tiles, rest = divmod(num_outputs, rows)
    result = lax.map(tile, jnp.arange(tiles) * rows).reshape(tiles * rows, tokens)
    return (jnp.concatenate([result, tile(tiles * rows, rest)]) if rest else result).T


def multiply_whole(weight: QuantizedWeight, x):
    """One product, in the dtype of x; per-output scales are applied after it."""
    if weight.format.values == "int4" or not _one_scale(weight):
        return _dot(x, dequantize(weight).astype(x.dtype).T)
    return _dot(x, weight.values.astype(x.dtype).T) * weight.scales[:, 0].astype(jnp.float32)


def _multiply(tile, parts):
    """Float32 [rows, tokens] of a tile and the inputs of its columns [columns, tokens], in one part
    or two."""
    values = nibbles(tile) if tile.format.values == "int4" else (tile.values,)
    if _one_scale(tile):
        products = [_dot(part.astype(jnp.float32), x) for part, x in zip(values, parts)]
        return sum(products) * tile.scales.astype(jnp.float32)
    return sum(_dot(scaled(tile, part), x) for part, x in zip(values, parts))


def _one_scale(weight):
    return weight.format.group_size is None and weight.minima is None


def _rows(weight, first, rows):
    """The tile of `rows` rows from `first` on, with float8 values already as float16."""
    values, scales, minima = (
        None if plane is None else lax.dynamic_slice_in_dim(as_bits(plane), first, rows)
        for plane in (weight.values, weight.scales, weight.minima)
    )
    if weight.format.values == "float8_e4m3fn":
        values = _from_float8(values)
    else:
        values = lax.bitcast_convert_type(values, weight.values.dtype)
    scales = lax.bitcast_convert_type(scales, weight.scales.dtype)
    if minima is not None:
        minima = lax.bitcast_convert_type(minima, weight.minima.dtype)
    return dataclasses.replace(weight, values=values, scales=scales, minima=minima)


def _from_float8(bits):
    """Float16 of the bits of float8_e4m3fn, exactly; XLA's own conversion takes twice as long.

    Sign, exponent and mantissa are shifted to their float16 places, and a multiplication corrects
    the exponent biases, 7 and 15. Float16 reaches 65504, so nothing overflows.
    """
    moved = (lax.bitcast_convert_type(bits, jnp.int8).astype(jnp.int16) << 7) & -0x4001
    values = lax.bitcast_convert_type(moved, jnp.float16) * jnp.float16(2**8)
    return jnp.where(bits & 0x7F == 0x7F, jnp.float16(jnp.nan), values)


def _dot(left, right):
    return jnp.matmul(left, right, preferred_element_type=jnp.float32)
