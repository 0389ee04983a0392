"""The one signature of products with packed weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.quantized_matmul import xla
from pallas_kernels.quantized_matmul.formats import PackedWeight

_WIDE = ("float32", "bfloat16", "float16")
_FP8 = "float8_e4m3fn"


def quantized_matmul(
    weight: PackedWeight, x: jax.Array, dtype: jnp.dtype | None = None
) -> jax.Array:
    """`weight` [out, in] times x [in, tokens]: [out, tokens], summed in float32.

    x is float32, bfloat16 or float16; or, for float8_e4m3fn weights with one scale an output,
    float8_e4m3fn, whose own scales the caller applies to the result (they are its columns').
    dtype: of the result; without it that of x, or bfloat16 for an x of float8_e4m3fn.

    Raises ValueError for another dtype of x, or an x of another number of inputs than the weight.
    """
    num_inputs = weight.shape[1]
    if x.ndim != 2 or x.shape[0] != num_inputs:
        raise ValueError(f"x has shape {x.shape}; this weight takes [{num_inputs}, tokens].")
    takes = _WIDE
    if weight.format.values == _FP8 and weight.format.group is None:
        takes += (_FP8,)
    if x.dtype.name not in takes:
        raise ValueError(f"x is {x.dtype}; {weight.format} takes {', '.join(takes)}.")
    if dtype is None:
        dtype = jnp.bfloat16 if x.dtype.name == _FP8 else x.dtype
    return xla.quantized_matmul(weight, x).astype(dtype)
