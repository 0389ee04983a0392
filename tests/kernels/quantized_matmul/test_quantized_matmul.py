"""Packed weights against float64 loops, and against GGUF's own library to the last bit."""

from __future__ import annotations

import dataclasses
import functools

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from unoptimised import UNOPTIMISED

from pallas_kernels.quantized_matmul import (
    FP8,
    GGUF,
    Format,
    QuantizedWeight,
    dequantize,
    from_gguf,
    quantize,
    quantized_matmul,
    reference,
    xla,
)

FORMATS = {
    **GGUF,
    "fp8": FP8,
    "fp8 groups": Format("float8_e4m3fn", 32, scale_dtype="bfloat16"),
    "int8 rows": Format("int8", None),
    "int8": Format("int8", 16, scale_dtype="bfloat16"),
    "int8 minimum": Format("int8", 48, minimum=True),
    "int8 rows minimum": Format("int8", None, minimum=True),
    "int4 rows": Format("int4", None),
    "int4": Format("int4", 64),
    "int4 minimum": Format("int4", 64, minimum=True, scale_dtype="bfloat16"),
    "int4 rows minimum": Format("int4", None, minimum=True),
}
all_formats = pytest.mark.parametrize("name", FORMATS)
INPUTS = 192

pack = jax.jit(quantize, static_argnums=1)
unpack = jax.jit(dequantize)


def random_weight(num_outputs, num_inputs=INPUTS, seed=0):
    rng = np.random.default_rng(seed)
    return (0.1 + rng.normal(size=(num_outputs, num_inputs))).astype(np.float32)


def random_x(tokens, num_inputs=INPUTS, seed=1):
    return np.random.default_rng(seed).normal(size=(tokens, num_inputs)).astype(np.float32)


def assert_same_product(actual, weight, x, tolerance):
    """Wrong by no more than `tolerance` of the sum of the magnitudes that were added."""
    expected = reference.quantized_matmul(weight, x)
    magnitudes = np.abs(np.asarray(x, np.float64)) @ np.abs(reference.dequantize(weight)).T
    assert actual.shape == expected.shape
    error = np.abs(np.asarray(actual, np.float64) - expected)
    assert (error <= tolerance * magnitudes + 1e-30).all(), (error / magnitudes).max()


class QuantizedMatmulContract:
    """What `implementation`, with the signature of `quantized_matmul`, must do."""

    implementation = None
    formats = tuple(FORMATS)

    @classmethod
    @functools.cache
    def jitted(cls):
        return jax.jit(cls.implementation, compiler_options=UNOPTIMISED)

    @pytest.mark.parametrize("shape", [(1, 1), (67, 5)])
    @all_formats
    def test_odd_shapes(self, name, shape):
        num_outputs, tokens = shape
        weight = pack(random_weight(num_outputs), FORMATS[name])
        x = random_x(tokens)
        y = self.jitted()(weight, x)
        assert y.dtype == jnp.float32
        assert_same_product(y, weight, x, 1e-6)

    @pytest.mark.parametrize("tokens", [2, 70])
    @pytest.mark.parametrize("name", ["Q4_1", "fp8"])
    def test_several_tiles_and_a_rest(self, name, tokens):
        """Of the tiles for few tokens and for many; rows beyond a tile are no one else's."""
        weight = pack(random_weight(5500), FORMATS[name])
        x = random_x(tokens)
        assert_same_product(self.jitted()(weight, x), weight, x, 1e-6)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @all_formats
    def test_half_precision(self, name, dtype):
        weight = pack(random_weight(33), FORMATS[name])
        x = jnp.asarray(random_x(4), dtype)
        y = self.jitted()(weight, x)
        assert y.dtype == x.dtype
        assert_same_product(y, weight, x, float(jnp.finfo(dtype).eps))

    def test_float8_times_float8(self):
        weight = pack(random_weight(33), FP8)
        x = jnp.asarray(random_x(4), jnp.float8_e4m3fn)
        assert self.jitted()(weight, x).dtype == jnp.bfloat16
        y = jax.jit(functools.partial(type(self).implementation, dtype=jnp.float32))(weight, x)
        assert y.dtype == jnp.float32
        assert_same_product(y, weight, x, 1e-6)

    @settings(max_examples=20, deadline=None)
    @given(
        name=st.sampled_from(list(FORMATS)),
        seed=st.integers(0, 2**32 - 1),
        exponents=st.lists(st.integers(-12, 6), min_size=17, max_size=17),
    )
    def test_rows_of_any_size(self, name, seed, exponents):
        scales = 2.0 ** np.array(exponents, np.float32)[:, None]
        weight = pack(random_weight(17, seed=seed) * scales, FORMATS[name])
        x = random_x(3, seed=seed)
        assert_same_product(self.jitted()(weight, x), weight, x, 1e-6)

    @pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "fp8"])
    def test_under_shard_map(self, name):
        """Planes split as the weight would be: here by outputs."""
        mesh = Mesh(np.array(jax.devices()), ("tensor",))
        weight = pack(random_weight(2000 * mesh.size), FORMATS[name])
        x = random_x(2)
        mapped = jax.shard_map(
            type(self).implementation,
            mesh=mesh,
            in_specs=(P("tensor"), P()),
            out_specs=P(None, "tensor"),
        )
        assert_same_product(jax.jit(mapped)(weight, x), weight, x, 1e-6)


class TestXla(QuantizedMatmulContract):
    implementation = staticmethod(quantized_matmul)


@all_formats
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_multiplied_whole_means_the_same(name, dtype):
    """What accelerators run, which rounds weights to the dtype of x."""
    weight = pack(random_weight(33), FORMATS[name])
    x = jnp.asarray(random_x(4), dtype)
    y = jax.jit(xla.multiply_whole)(weight, x)
    assert y.dtype == jnp.float32
    assert_same_product(y, weight, x, max(1e-6, float(jnp.finfo(dtype).eps)))


@all_formats
def test_dequantized_as_the_reference_says(name):
    weight = pack(random_weight(7), FORMATS[name])
    assert weight.shape == (7, INPUTS)
    np.testing.assert_allclose(unpack(weight), reference.dequantize(weight), rtol=1e-6, atol=1e-6)


@all_formats
def test_parts_by_inputs_add_up_to_the_whole(name):
    """Planes may be split between groups, and rows of one scale share it."""
    weight, x = pack(random_weight(9), FORMATS[name]), random_x(2)
    half = INPUTS // 2 if INPUTS // 2 % (FORMATS[name].group_size or 32) == 0 else INPUTS // 3
    y = 0
    for first, last in ((0, half), (half, INPUTS)):
        planes = [
            plane
            if plane is None or plane.shape[1] == 1
            else plane[:, first * plane.shape[1] // INPUTS : last * plane.shape[1] // INPUTS]
            for plane in (weight.values, weight.scales, weight.minima)
        ]
        y += quantized_matmul(QuantizedWeight(*planes, weight.format), x[:, first:last])
    assert_same_product(y, weight, x, 1e-6)


@pytest.mark.parametrize("name", ["int4", "int8 minimum"])
def test_inputs_in_another_order(name):
    """Columns in the order in which groups are consecutive; or in two, of half of the rows each."""
    weight, x = pack(random_weight(8), FORMATS[name]), random_x(2)
    rng = np.random.default_rng(0)
    orders = np.stack([rng.permutation(INPUTS) for _ in range(2)]).astype(np.int32)
    format = dataclasses.replace(weight.format, ordered=True)
    ordered = dataclasses.replace(weight, format=format, order=orders)
    for row, own, expected in zip(
        unpack(ordered), np.repeat(orders, 4, axis=0), reference.dequantize(weight), strict=True
    ):
        np.testing.assert_allclose(row[own], expected, rtol=1e-6, atol=1e-6)
    one = dataclasses.replace(ordered, order=orders[:1])
    assert_same_product(TestXla.jitted()(one, x), weight, x[:, orders[0]], 1e-6)


@settings(max_examples=20, deadline=None)
@given(
    name=st.sampled_from(list(FORMATS)),
    seed=st.integers(0, 2**32 - 1),
    exponent=st.integers(-10, 10),
)
def test_quantizing_is_wrong_by_half_a_step(name, seed, exponent):
    """Or by the whole one by which symmetric int4 clips; and a little for rounded scales."""
    format, values = FORMATS[name], random_weight(5, seed=seed) * 2.0**exponent
    weight = pack(values, format)
    group = format.group_size or INPUTS
    scales = np.repeat(np.abs(np.asarray(weight.scales, np.float64)), group, axis=1)
    error = np.abs(np.asarray(unpack(weight), np.float64) - values)
    if format.values == "float8_e4m3fn":
        # Half of a step that is an eighth of the power of two below, 2**-6 at least.
        step = np.maximum(np.abs(values) / 8, scales * 2.0**-9)
    else:
        step = scales * (2 if format.values == "int4" and not format.minimum else 1)
    extremes = np.repeat(np.abs(values).reshape(5, -1, group).max(-1), group, axis=1)
    rounded = 2 * extremes * float(jnp.finfo(format.scale_dtype).eps) + extremes * 1e-6
    assert (error <= step / 2 + rounded).all()


@all_formats
@pytest.mark.parametrize("value", [0.0, -3.0, 0.25])
def test_a_constant_weight_stays_what_it_is(name, value):
    weight = pack(np.full((2, INPUTS), value, np.float32), FORMATS[name])
    rounding = float(jnp.finfo(FORMATS[name].scale_dtype).eps)
    np.testing.assert_allclose(unpack(weight), value, rtol=max(rounding, 1e-6))


SIMPLE_BLOCKS = ("Q8_0", "Q4_0", "Q4_1")
"""Those whose planes hold what the blocks hold; others are in tests/models/test_quantization.py."""


@pytest.mark.parametrize("kind", SIMPLE_BLOCKS)
def test_gguf_blocks_mean_to_the_last_bit_what_the_library_says(kind):
    blocks = random_blocks(kind, rows=6)
    weight = from_gguf(blocks, kind)
    expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert weight.shape == expected.shape == (6, INPUTS)
    for way in (dequantize, unpack):
        actual = np.asarray(way(weight))
        assert actual.dtype == expected.dtype == np.float32
        np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))
    x = random_x(3)
    np.testing.assert_allclose(quantized_matmul(weight, x), x @ expected.T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", SIMPLE_BLOCKS)
def test_gguf_planes_take_the_memory_of_the_blocks(kind):
    blocks = random_blocks(kind, rows=6)
    assert sum(plane.nbytes for plane in jax.tree.leaves(from_gguf(blocks, kind))) == blocks.nbytes


def random_blocks(kind, rows):
    """Any bytes [rows, row_bytes], but for scales and minima, which are finite."""
    rng = np.random.default_rng(0)
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    blocks = rng.integers(0, 256, (rows, INPUTS // 32, size), np.uint8)
    header = 4 if GGUF[kind].minimum else 2
    halves = rng.normal(size=(rows, INPUTS // 32, header // 2)).astype("<f2")
    halves[0, :4, 0] = 0, -0.0, 6e-8, 65504  # zeros, a subnormal and the largest
    blocks[..., :header] = halves.view(np.uint8)
    return blocks.reshape(rows, -1)


def test_every_float8_is_converted_exactly():
    bits = np.arange(256, dtype=np.uint8)
    exact = bits.view(jnp.float8_e4m3fn).astype(np.float32)
    assert np.isnan(exact).sum() == 2
    values = bits.view(jnp.float8_e4m3fn)[:, None]
    column = QuantizedWeight(values, np.ones((256, 1), np.float32), None, FP8)
    y = jax.jit(quantized_matmul)(column, np.ones((1, 1), np.float32))
    np.testing.assert_array_equal(y[0], exact)


def test_a_packed_weight_is_a_pytree_and_its_format_is_static():
    weight = pack(random_weight(4), GGUF["Q4_1"])
    assert len(jax.tree.leaves(weight)) == 3
    stacked = jax.tree.map(lambda plane: jnp.stack([plane, plane]), weight)
    assert stacked.format is weight.format
    _, products = jax.lax.scan(
        lambda carry, layer: (carry, quantized_matmul(layer, carry)), random_x(2), stacked
    )
    np.testing.assert_array_equal(products[0], products[1])


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="Values cannot be 'int3'; they can be int8, int4 or"):
        Format("int3", 32)
    with pytest.raises(ValueError, match=r"A group of int4 cannot be 48 .* multiple of 32"):
        Format("int4", 48)
    with pytest.raises(ValueError, match="A group of int8 cannot be 0"):
        Format("int8", 0)
    with pytest.raises(ValueError, match="take no minimum"):
        Format("float8_e4m3fn", None, minimum=True)
    with pytest.raises(ValueError, match="Scales cannot be int8; they can be float32, float16"):
        Format("int8", None, scale_dtype="int8")
    with pytest.raises(ValueError, match=r"576 inputs are not .* 128; int4 .* 32, 64, 96, 192"):
        quantize(np.zeros((2, 576), np.float32), Format("int4", 128))
    with pytest.raises(ValueError, match=r"50 inputs are not .* 32; int4 .* no size from 16"):
        quantize(np.zeros((2, 50), np.float32), Format("int4", None))
    with pytest.raises(ValueError, match="Q3_K does not stay quantized; Q8_0, Q4_0, Q4_1, Q5_0"):
        from_gguf(np.zeros((2, 110), np.uint8), "Q3_K")
    with pytest.raises(ValueError, match="Rows of 35 bytes are not whole Q8_0 blocks of 34"):
        from_gguf(np.zeros((2, 35), np.uint8), "Q8_0")


def test_what_cannot_be_multiplied_is_refused():
    weight = pack(random_weight(4), GGUF["Q8_0"])
    with pytest.raises(ValueError, match=r"shape \(2, 5\); this weight takes \[tokens, 192\]"):
        quantized_matmul(weight, random_x(2, 5))
    with pytest.raises(ValueError, match=r"x has shape \(192,\)"):
        quantized_matmul(weight, np.zeros(192, np.float32))
    with pytest.raises(ValueError, match=r"x is int32; .* takes float32, bfloat16, float16"):
        quantized_matmul(weight, random_x(2).astype(np.int32))
    with pytest.raises(ValueError, match=r"x is float8_e4m3fn; .* float32, bfloat16, float16\."):
        quantized_matmul(weight, jnp.asarray(random_x(2), jnp.float8_e4m3fn))
