"""Unpacking of quantized values in registers, into left operands of Hopper's tensor cores.

A thread loads four bytes of a row together, 4 c to 4 c + 3 of every 16, where c is its index among
the four threads that hold the row. As a left operand it must hold columns 2 c, 2 c + 1, 8 + 2 c and
9 + 2 c of every 16. Columns may be any inputs as long as the rows of x are in the same order, so no
data moves between threads: the first and third byte become neighbours in an operand of the even
inputs, in order, the second and fourth in one of the odd inputs.

Four-bit values are stored in blocks of 32 inputs whose low halves come first: 16 columns of even
inputs are 8 low halves and then 8 high ones. Eight-bit values take two blocks of 16 bytes.

Two numbers are computed per register, by packed instructions. None of them converts two integers.
But one shift and one logical operation put integers into the mantissas of floats with a suitable
exponent, and subtracting a constant then gives the exact value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.mosaic.gpu import utils as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat.gpu import arith, ir, llvm
from pallas_kernels.quantized_matmul.formats import Format

PACKED = plgpu.Layout.WGMMA_8BIT
"""Register layout of the quantized bytes."""

_BLOCK = 16  # bytes of a row that four threads load together


def unpack(
    packed: jax.Array, odd: int, format: Format, dtype: jnp.dtype, interpret: Any
) -> jax.Array:
    """The even or odd inputs of uint8, int8 or float8 `packed` [64, columns], exactly.

    [64, inputs / 2] bfloat16 or float16, in registers as left operands. Integers above a minimum
    come out as their distance from the middle, 8 or 128. A NaN of float8_e4m3fn is 480.
    """

    def pick(shifts, mask, flip=0):
        return _pick(packed, [8 * odd + shift for shift in shifts], mask, flip, interpret)

    def number(shifts, mask, flip):
        return lax.bitcast_convert_type(pick(shifts, mask, flip), dtype)

    half = dtype == jnp.float16
    if format.values == "float8_e4m3fn":
        # Exponent and mantissa are shifted to their places in `dtype`, whose exponents begin lower.
        # Subnormals stay subnormal until the multiplication, which is exact on GPUs.
        shift, lower = (7, 8) if half else (4, 120)
        bits = pick([-shift], 0x7F << shift) | pick([-8], 0x8000)
        return lax.bitcast_convert_type(bits, dtype) * jnp.array(2.0**lower, dtype)
    if format.values == "int4":
        return number([0, 4], 0x0F, 0x6400) - 1032 if half else number([0, 4], 0x0F, 0x4300) - 136
    sign = 0 if format.minimum else 0x80
    if half:
        return number([0], 0xFF, 0x6400 | sign) - 1152
    # bfloat16 has a 7-bit mantissa: the eighth bit changes the exponent, from 128 to 256.
    return number([0], 0x7F, 0x4300) - number([0], 0x80, 0x4380 ^ sign)


def _pick(packed, shifts, mask, flip, interpret):
    """uint16 (word >> shift) & mask ^ flip of both halves of every four bytes, for each shift."""
    rows, columns = packed.shape
    mask, flip = mask * 0x10001, flip * 0x10001
    if interpret:
        octets = lax.bitcast_convert_type(packed, jnp.uint8).astype(jnp.uint32)
        octets = octets.reshape(rows, columns // _BLOCK, 1, 4, 4)
        word = sum(octets[..., n] << 8 * n for n in range(4))
        words = [word >> shift if shift >= 0 else word << -shift for shift in shifts]
        words = jnp.concatenate(words, axis=2) & jnp.uint32(mask) ^ jnp.uint32(flip)
        pairs = jnp.stack([words & 0xFFFF, words >> 16], axis=-1)
        return pairs.astype(jnp.uint16).reshape(rows, -1)

    @plgpu.inline_mgpu(
        arg_types=(PACKED,),
        return_type=plgpu.ShapeDtypeStruct(
            (rows, columns // 2 * len(shifts)), jnp.uint16, plgpu.Layout.WGMMA
        ),
    )
    def pick(_, packed):
        word_type, pair_type = ir.IntegerType.get_signless(32), ir.Type.parse("vector<2xi16>")

        def pairs_of(register):
            word = mgpu.bitcast(register, word_type)
            for shift in shifts:
                move = arith.shrui if shift >= 0 else arith.shli
                moved = move(word, mgpu.c(abs(shift), word_type)) if shift else word
                picked = llvm.inline_asm(
                    word_type, [moved], f"lop3.b32 $0, $1, {mask:#x}, {flip:#x}, 0x6a;", "=r,r"
                )
                yield mgpu.bitcast(picked, pair_type)

        registers = in_operand(packed.registers, pairs_of, len(shifts))
        layout = plgpu.Layout.WGMMA.to_mgpu()
        return FragmentedArray(_registers=registers, _layout=layout, _is_signed=False)

    return pick(packed)


def in_operand(registers: np.ndarray, pairs_of: Callable, count: int) -> np.ndarray:
    """A thread's registers as a left operand: the `count` pairs of each register of packed bytes.

    Both have a row's columns in order along their second axis.
    """
    shape = registers.shape[0], registers.shape[1] * count, *registers.shape[2:]
    operand = np.empty(shape, object)
    for (row, column, *rest), register in np.ndenumerate(registers):
        for n, pair in enumerate(pairs_of(register)):
            operand[row, column * count + n, *rest] = pair
    return operand
