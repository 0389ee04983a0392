"""The Hopper kernel for packed weights, interpreted on the host with races detected.

The interpreter compiles each simulated warpgroup in every call, so there are few calls, all of
them small. They prove what is loaded, unpacked, scaled, summed and shared among blocks, and the
reuse of buffers. They do not prove how operands lie in registers and shared memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_quantized_matmul import assert_same_product, pack, random_weight, random_x

from pallas_kernels.compat import gpu as compat
from pallas_kernels.quantized_matmul import FP8, GGUF, Format
from pallas_kernels.quantized_matmul.mosaic_gpu import quantized_matmul, unsupported
from pallas_kernels.quantized_matmul.mosaic_gpu_unpack import PACKED, in_operand, unpack
from pallas_kernels.quantized_matmul.stream_k import Shares

pytestmark = pytest.mark.interpreted


def product(weight, x):
    """Interpreted, for one multiprocessor."""
    with compat.gpu_interpreter(detect_races=True) as interpreter:

        def run(weight, x):
            return quantized_matmul(weight, x, num_sms=1, interpret=interpreter)

        return np.asarray(jax.jit(run)(weight, x))


def check(format, num_outputs, num_inputs, tokens, dtype="bfloat16", tolerance=None):
    """Wrong by no more than rounding scales and values to the dtype of x explains."""
    weight = pack(random_weight(num_outputs, num_inputs), format)
    x = jnp.asarray(random_x(tokens, num_inputs), dtype)
    y = product(weight, x)
    assert y.dtype == np.float32
    assert_same_product(y, weight, x, tolerance or float(jnp.finfo(dtype).eps))


class TestInterpreted:
    @pytest.mark.oldest_jax
    def test_sums_of_parts(self):
        """Five tiles of three steps for three blocks of threads: two tiles have two parts."""
        check(GGUF["Q4_1"], 320, 192, 3)

    def test_whole_tiles_of_more_tokens_than_one_holds(self):
        """Two steps that load the same scales, and each use their own."""
        check(Format("int4", 64, scale_dtype="bfloat16"), 64, 128, 130)

    def test_several_warpgroups_and_rows_of_scales_that_are_no_whole_loads(self):
        check(GGUF["Q8_0"], 128, 160, 20, "float16")

    def test_a_minimum_and_groups_larger_than_a_step(self):
        check(Format("int8", 128, minimum=True), 64, 128, 70)

    @pytest.mark.parametrize("format", [Format("int4", None, minimum=True), FP8])
    def test_scales_of_rows_are_exact(self, format):
        check(format, 64, 64, 2, tolerance=2e-6)  # for sums of 64 in float32

    @pytest.mark.oldest_jax
    def test_float8_times_float8(self):
        check(FP8, 64, 96, 5, "float8_e4m3fn", tolerance=1e-6)

    def test_a_token_does_not_depend_on_the_others(self):
        """Not on their number within a tile's, nor on what they are, to the last bit."""
        weight, x = (
            pack(random_weight(64, 64), GGUF["Q4_0"]),
            jnp.asarray(random_x(3, 64), "bfloat16"),
        )
        together = product(weight, x.at[1].set(jnp.nan))
        np.testing.assert_array_equal(product(weight, x[2:])[0], together[2])
        assert np.isnan(together[1]).all() and not np.isnan(together[0]).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "format",
    [
        Format("int4", None),
        Format("int8", None),
        Format("int8", None, minimum=True),
        Format("float8_e4m3fn", None),
    ],
    ids=str,
)
def test_all_bytes_are_unpacked_exactly_and_in_order(format, dtype):
    """Even and odd inputs; of integers above a minimum, the distance from the middle."""
    packed = np.random.default_rng(0).permuted(np.tile(np.arange(256, dtype=np.uint8), 4))
    packed = packed.reshape(2, -1)
    if format.values == "float8_e4m3fn":
        packed[packed & 0x7F == 0x7F] = 0  # NaNs
        if dtype == "bfloat16":
            packed[packed & 0x78 == 0] = 0  # on the way they are subnormal, which XLA flushes here
    packed = packed.view(format.dtype)
    if format.values == "int4":
        blocks = packed.reshape(2, -1, 1, 16)
        expected = np.concatenate([blocks % 16, blocks // 16], axis=2).reshape(2, -1) - 8.0
    else:
        expected = packed.astype(np.float64) - (128 if format.minimum else 0)
    for odd in (0, 1):
        numbers = unpack(jnp.asarray(packed), odd, format, jnp.dtype(dtype), True)
        assert numbers.dtype == dtype
        np.testing.assert_array_equal(np.asarray(numbers, np.float64), expected[:, odd::2])


def registers_of(layout, array):
    """[threads, a warpgroup's registers, as the compiler indexes them] of vectors of `array`."""
    layout = layout.to_mgpu()
    for tile in layout.tiling.tiles:
        kept = array.ndim - len(tile)
        split = [n for size, t in zip(array.shape[kept:], tile) for n in (size // t, t)]
        array = array.reshape(*array.shape[:kept], *split)
        order = [*range(kept, array.ndim, 2), *range(kept + 1, array.ndim, 2)]
        array = array.transpose(*range(kept), *order)
    threads = []
    places = [dim + array.ndim for dim in (*layout.warp_dims, *layout.lane_dims)]
    sizes = [array.shape[place] for place in places]
    assert np.prod(sizes) == 128
    for place in np.ndindex(*sizes):
        index = [slice(None)] * array.ndim
        for dim, n in zip(places, place):
            index[dim] = slice(n, n + 1)
        own = array[tuple(index)]
        registers = np.empty(own.shape[:-1], object)
        for at in np.ndindex(registers.shape):
            registers[at] = own[at]
        threads.append(registers[..., None])
    return threads


@pytest.mark.parametrize("format", [Format("int4", None), Format("int8", None)], ids=str)
def test_threads_have_what_the_interpreter_says(format):
    """By the compiler's own description of how bytes and operands lie in registers."""
    packed = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8).view(format.dtype)
    shifts, mask, bias = ([0, 4], 15, 8) if format.values == "int4" else ([0], 255, 128)
    for odd in (0, 1):
        operand = unpack(jnp.asarray(packed), odd, format, jnp.dtype("float16"), True)
        expected = registers_of(plgpu.Layout.WGMMA, np.asarray(operand, np.int64))

        def pairs_of(octets, odd=odd):
            word = int.from_bytes(octets.tobytes(), "little")
            for shift in shifts:
                halves = np.int64([word >> 8 * odd + shift, word >> 8 * odd + shift + 16])
                yield ((halves & mask) ^ (0 if format.values == "int4" else 128)) - bias

        for thread, registers in enumerate(registers_of(PACKED, packed)):
            actual = in_operand(registers, pairs_of, len(shifts))
            assert actual.shape == expected[thread].shape
            for mine, its in zip(actual.flat, expected[thread].flat):
                np.testing.assert_array_equal(mine, its)


@settings(max_examples=15, deadline=None)
@given(tiles=st.integers(1, 30), steps=st.integers(1, 20), blocks=st.integers(1, 20))
def test_every_step_of_every_tile_is_one_blocks(tiles, steps, blocks):
    shares = Shares.of(tiles, steps, blocks)
    assert shares.blocks <= blocks
    parts = {tile: {} for tile in range(tiles)}
    for block in range(shares.blocks):
        taken = 0
        for index in range(int(shares.tiles_of(jnp.int32(block)))):
            tile, part, first, count = (int(n) for n in shares.tile_of(jnp.int32(block), index))
            assert count > 0 and part not in parts[tile]
            parts[tile][part] = range(first, first + count)
            taken += count
        assert 0 < taken <= shares.run
    assert [len(of_tile) for of_tile in parts.values()] == shares.parts().tolist()
    for of_tile in parts.values():
        in_order = [step for part in range(len(of_tile)) for step in of_tile[part]]
        assert in_order == list(range(steps))


def test_no_block_has_much_more_to_do_than_the_others():
    """Time lost by whole tiles is a tenth, or a fifth where four rounds of them hide it."""
    for tiles in range(1, 1200, 7):
        shares = Shares.of(tiles, 56, 132)
        fair = tiles * 56 / 132
        assert shares.run <= max(fair + 1, fair / (0.8 if tiles >= 4 * 132 else 0.89))


@pytest.mark.parametrize(
    ("format", "shape", "dtype", "message"),
    [
        (FP8, (64, 64), "float32", "x is float32; .* bfloat16, float16, float8_e4m3fn"),
        (GGUF["Q8_0"], (64, 64), "float8_e4m3fn", "x is float8_e4m3fn; .* bfloat16, float16"),
        (Format("int8", 16), (64, 64), "bfloat16", r"groups are of 16 .* \(32, 64, 128\) or"),
        (GGUF["Q4_0"], (96, 64), "bfloat16", "96 outputs; they can be any multiple of 64"),
        (GGUF["Q4_0"], (64, 96), "bfloat16", "96 inputs; for int4 .* any multiple of 64"),
        (FP8, (64, 48), "bfloat16", "48 inputs; for float8_e4m3fn .* any multiple of 32"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(format, shape, dtype, message):
    weight = jax.eval_shape(lambda: pack(jnp.zeros(shape), format))
    x = jax.ShapeDtypeStruct((3, shape[1]), dtype)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(quantized_matmul, weight, x)
    assert unsupported(weight, jax.ShapeDtypeStruct((3, shape[1]), "int8")) is not None
