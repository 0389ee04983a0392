"""Signature of the quantized matmul."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import backends
from pallas_kernels.quantized_matmul import check_case, xla
from pallas_kernels.quantized_matmul.formats import QuantizedWeight

_WIDE = ("float32", "bfloat16", "float16")
_FP8 = "float8_e4m3fn"

_MULTIPLY = backends.Operation(
    name="quantized_matmul",
    xla=xla.quantized_matmul,
    kernels={
        "gpu": "pallas_kernels.quantized_matmul.mosaic_gpu",
        "tpu": "pallas_kernels.quantized_matmul.mosaic_tpu",
    },
    shapes_class=check_case.shapes_class,
    check_case=check_case.check_case,
)


def quantized_matmul(
    weight: QuantizedWeight,
    x: jax.Array,
    dtype: jnp.dtype | None = None,
    *,
    backend: backends.Backend = "auto",
) -> jax.Array:
    """x [tokens, in] times `weight` [out, in] transposed: [tokens, out], summed in float32.

    x is float32, bfloat16 or float16; or, for float8_e4m3fn weights with one scale per output,
    float8_e4m3fn, whose per-token scales the caller applies to the rows of the result. Of a weight
    with orders the first one is used: all of its rows have the same.
    dtype: of the result; by default that of x, or bfloat16 for float8_e4m3fn.
    backend: see `backends.Backend`.

    Raises ValueError for other dtypes of x, when x and the weight differ in the number of inputs,
    and where `backend` is "pallas" for what the device's kernel does not support.
    """
    num_inputs = weight.shape[1]
    if x.ndim != 2 or x.shape[1] != num_inputs:
        raise ValueError(f"x has shape {x.shape}; this weight takes [tokens, {num_inputs}].")
    takes = _WIDE
    if weight.format.values == _FP8 and weight.format.group_size is None:
        takes += (_FP8,)
    if x.dtype.name not in takes:
        raise ValueError(f"x is {x.dtype}; {weight.format} takes {', '.join(takes)}.")
    if dtype is None:
        dtype = jnp.bfloat16 if x.dtype.name == _FP8 else x.dtype
    if 0 in (*weight.shape, *x.shape):
        return jnp.zeros((len(x), weight.shape[0]), dtype)
    if weight.order is not None:
        weight, x = weight.unordered, x[:, weight.order[0]]
    return _MULTIPLY.run(backend, weight, x).astype(dtype)
