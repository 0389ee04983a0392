"""The TPU kernel of products with packed weights, interpreted on the host."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from test_quantized_matmul import (
    FORMATS,
    QuantizedMatmulContract,
    all_formats,
    assert_same_product,
    pack,
    random_weight,
    random_x,
)

from pallas_kernels.compat import tpu as compat
from pallas_kernels.quantized_matmul import FP8, GGUF, Format, QuantizedWeight, mosaic_tpu, xla

pytestmark = pytest.mark.interpreted

REFUSED = "int8 minimum"
"""The one name among FORMATS that the kernel refuses, for its groups of 48."""

interpreted = functools.partial(mosaic_tpu.quantized_matmul, interpret=True)
run = jax.jit(interpreted)


def or_xla(weight, x, dtype=None):
    """With a choice of dtypes, and done by XLA where the kernel refuses, as callers see it."""
    function = xla.quantized_matmul if mosaic_tpu.unsupported(weight, x) else interpreted
    if dtype is None:
        dtype = jnp.bfloat16 if x.dtype == jnp.float8_e4m3fn else x.dtype
    return function(weight, x).astype(dtype)


class TestMosaicTpu(QuantizedMatmulContract):
    implementation = staticmethod(or_xla)

    @pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "fp8"])
    def test_under_shard_map(self, name):
        """Not checking what varies: what XLA makes of an interpreted kernel fails that check."""
        mesh = Mesh(np.array(jax.devices()), ("tensor",))
        weight = pack(random_weight(300 * mesh.size), FORMATS[name])
        x = random_x(2)
        mapped = jax.shard_map(
            interpreted,
            mesh=mesh,
            in_specs=(P("tensor"), P()),
            out_specs=P(None, "tensor"),
            check_vma=False,
        )
        assert_same_product(jax.jit(mapped)(weight, x), weight, x, 1e-6)


@all_formats
def test_all_formats_but_one_are_done_by_the_kernel(name):
    weight = pack(random_weight(4), FORMATS[name])
    assert (mosaic_tpu.unsupported(weight, random_x(2)) is not None) == (name == REFUSED)


INPUTS = 4672
"""Two or three tiles of int4 and three or five of int8, none a whole number of blocks."""


@pytest.mark.parametrize(("num_outputs", "tokens"), [(1100, 3), (600, 530)])
@pytest.mark.parametrize("name", ["Q4_1", "fp8", "fp8 groups"])
def test_several_tiles_in_every_direction(name, num_outputs, tokens):
    """And beyond the last of them anything: the interpreter has NaNs there."""
    weight = pack(random_weight(num_outputs, INPUTS), FORMATS[name])
    x = jnp.asarray(random_x(tokens, INPUTS), jnp.bfloat16)
    y = run(weight, x)
    assert y.dtype == jnp.float32
    assert_same_product(y, weight, x, 2**-8)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp8", "float8_e4m3fn"),
        ("fp8", "bfloat16"),
        ("int8 rows", "bfloat16"),
        ("int4 rows minimum", "bfloat16"),
    ],
)
def test_scales_of_whole_rows_cost_no_rounding(name, dtype):
    weight = pack(random_weight(33), FORMATS[name])
    x = jnp.asarray(random_x(4), dtype)
    assert_same_product(run(weight, x), weight, x, 1e-6)


@pytest.mark.parametrize(("values", "group"), [("int8", 64), ("int8", 4096), ("int4", 256)])
def test_groups_of_any_power_of_two(values, group):
    """From several in 128 columns to one in several tiles."""
    weight = pack(random_weight(5, 8192), Format(values, group, minimum=True))
    x = random_x(2, 8192)
    assert_same_product(run(weight, x), weight, x, 1e-6)


def test_every_float16_is_a_scale_exactly():
    bits = np.arange(1 << 16, dtype=np.uint16)
    scales = bits.view(np.float16)[np.isfinite(bits.view(np.float16))][:, None]
    values = np.zeros((len(scales), 32), np.int8)
    values[:, 5] = 1
    weight = QuantizedWeight(values, scales, None, GGUF["Q8_0"])
    y = run(weight, np.ones((1, 32), np.float32))
    np.testing.assert_array_equal(y.T, scales.astype(np.float32))


def test_every_float8_is_converted_exactly():
    values = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn)[:, None]
    column = QuantizedWeight(values, np.ones((256, 1), np.float32), None, FP8)
    for dtype in ("float32", "bfloat16"):
        y = run(column, np.ones((1, 1), dtype))
        np.testing.assert_array_equal(y.T, values.astype(np.float32))


@pytest.mark.oldest_jax
@pytest.mark.parametrize("name", ["Q4_1", "fp8"])
def test_no_races_and_no_memory_that_was_never_written(name):
    weight = pack(random_weight(1100, 64), FORMATS[name])
    x = jnp.asarray(random_x(2, 64), jnp.bfloat16)
    with compat.tpu_interpreter() as interpreter:
        function = functools.partial(mosaic_tpu.quantized_matmul, interpret=interpreter)
        y = np.asarray(jax.jit(function)(weight, x))
    assert_same_product(y, weight, x, 2**-8)


@pytest.mark.parametrize(
    ("name", "x", "message"),
    [
        (REFUSED, random_x(2), r"groups are of 48 .* int8 .* be of 16 times a power of two"),
        ("Q8_0", random_x(2).astype(np.int32), r"x is int32; it can be float32, bfloat16"),
        ("Q8_0", random_x(0), r"\[4, 192\] times x \[0, 192\] is empty"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(name, x, message):
    with pytest.raises(ValueError, match=message):
        interpreted(pack(random_weight(4), FORMATS[name]), x)
