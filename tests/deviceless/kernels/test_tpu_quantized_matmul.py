"""The TPU kernel of products with packed weights, compiled for TPUs."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from exhaustive import combination, combinations_but
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tpu import CHIPS, array, compiled, mesh, sharding

from pallas_kernels.quantized_matmul import FP8, GGUF, Format, abstract_weight
from pallas_kernels.quantized_matmul.mosaic_tpu import quantized_matmul

pytestmark = pytest.mark.deviceless

FORMATS = {
    **GGUF,
    "fp8": FP8,
    "fp8 groups": Format("float8_e4m3fn", 128, scale_dtype="bfloat16"),
    "int8 least groups": Format("int8", 16, minimum=True),
    "int4 groups": Format("int4", 128, scale_dtype="bfloat16"),
    "int4 rows": Format("int4", None),
}


def arguments(on, name, num_outputs, num_inputs, tokens, dtype=jnp.bfloat16):
    weight = abstract_weight(num_outputs, num_inputs, FORMATS[name])
    weight = jax.tree.map(lambda plane: array(on, *plane.shape, dtype=plane.dtype), weight)
    return weight, array(on, tokens, num_inputs, dtype=dtype)


def assert_never_unpacked(program, weight):
    """Outside of the kernel no floating array is as large as the weight's bytes."""
    num_outputs, num_inputs = weight.shape
    columns = rf"({num_inputs}|{num_inputs // 2})"
    unpacked = rf"(bf16|f16|f32)\[({num_outputs},{columns}|{columns},{num_outputs})\]"
    assert not re.search(unpacked, program.as_text())


@pytest.mark.parametrize(
    ("chip", "name"),
    [(CHIPS[0], name) for name in FORMATS]
    + [(CHIPS[-1], "fp8")]
    + [combination(c, n) for c in CHIPS[1:-1] for n in ("Q4_0", "fp8")]
    + [combination(CHIPS[-1], "Q4_0")],
)
def test_decode(chip, name):
    """One kernel, and what is around it transposes by calling things differently."""
    weight, x = arguments(sharding(chip), name, 14336, 4096, 16)
    program = compiled(lambda w, x: quantized_matmul(w, x).astype(jnp.bfloat16), weight, x)
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 1
    assert not re.search(r" transpose\(", program.as_text())
    assert_never_unpacked(program, weight)


@pytest.mark.parametrize("chip", combinations_but(CHIPS, CHIPS[0], CHIPS[-1]))
@pytest.mark.parametrize(("name", "dtype"), [("Q4_1", "bfloat16"), ("Q8_0", "float32")])
def test_prefill(chip, name, dtype):
    """The buffers of a step fit."""
    weight, x = arguments(sharding(chip), name, 4096, 14336, 2048, dtype)
    assert_never_unpacked(compiled(quantized_matmul, weight, x), weight)


@pytest.mark.parametrize(
    ("name", "tokens", "dtype"),
    [
        ("Q4_0", 1, "float32"),
        ("fp8", 130, "float16"),
        ("Q4_0", 600, "bfloat16"),
        combination("fp8", 1, "float32"),
        combination("Q4_0", 130, "float16"),
        combination("fp8", 600, "bfloat16"),
    ],
)
def test_odd_shapes(name, tokens, dtype):
    """Narrower than a block, and beyond the last whole one."""
    on = sharding(CHIPS[0])
    for num_outputs, num_inputs in ((33, 64), (1100, 4672)):
        compiled(quantized_matmul, *arguments(on, name, num_outputs, num_inputs, tokens, dtype))


@pytest.mark.parametrize("chip", combinations_but(CHIPS, CHIPS[0], CHIPS[-1]))
def test_float8_times_float8(chip):
    weight, x = arguments(sharding(chip), "fp8", 4096, 4096, 16, jnp.float8_e4m3fn)
    compiled(quantized_matmul, weight, x)


def test_under_shard_map():
    """What varies over the mesh is known to JAX: outputs over one axis, tokens over another."""
    on = mesh("v5e:2x2", (2, 2), ("data", "tensor"))
    outputs, tokens = P("tensor"), P("data")
    weight, _ = arguments(NamedSharding(on, outputs), "Q4_1", 4096, 4096, 256)
    _, x = arguments(NamedSharding(on, tokens), "Q4_1", 4096, 4096, 256)
    mapped = jax.shard_map(
        quantized_matmul, mesh=on, in_specs=(outputs, tokens), out_specs=P("data", "tensor")
    )
    text = compiled(mapped, weight, x).as_text()
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", text)
