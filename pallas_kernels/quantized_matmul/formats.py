"""Formats of quantized weights, quantization and dequantization.

A weight [out, in] becomes three planes, each with one row per output, so that a mesh can split them
like the weight itself: by outputs anywhere, by inputs between groups.

Four-bit values are stored as in GGUF, in blocks of 32 inputs whatever the group size: byte j of a
block's 16 holds input j in its low half and input j + 16 in its high half.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

INT4_BLOCK = 32
"""Inputs whose four-bit values share 16 bytes."""

_LARGEST = {"int8": 127, "float8_e4m3fn": 448}
_SCALE_DTYPES = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Format:
    """Quantization format: weight = scale * value, or scale * value + minimum.

    values: "int8", "int4" or "float8_e4m3fn". With a minimum, integers are 0 to 255 or 0 to 15;
    without, -128 to 127 or -8 to 7.
    group_size: consecutive inputs that share a scale (and a minimum), or None for a whole row.
    minimum: asymmetric; integers only.
    scale_dtype: of scales and minima, "float32", "float16" or "bfloat16".
    ordered: the weight has an order of its inputs, in which groups are consecutive.

    Raises ValueError for other values.
    """

    values: Literal["int8", "int4", "float8_e4m3fn"]
    group_size: int | None
    minimum: bool = False
    scale_dtype: str = "float32"
    ordered: bool = False

    def __post_init__(self):
        if self.values not in (*_LARGEST, "int4"):
            raise ValueError(
                f"Values cannot be {self.values!r}; they can be int8, int4 or float8_e4m3fn."
            )
        if self.scale_dtype not in _SCALE_DTYPES:
            raise ValueError(
                f"Scales cannot be {self.scale_dtype}; they can be {', '.join(_SCALE_DTYPES)}."
            )
        if self.values == "float8_e4m3fn" and self.minimum:
            raise ValueError("float8_e4m3fn values have a sign and take no minimum.")
        multiple = INT4_BLOCK if self.values == "int4" else 1
        if self.group_size is not None and (self.group_size < 1 or self.group_size % multiple):
            raise ValueError(
                f"A group of {self.values} cannot be {self.group_size} inputs; it can be any "
                f"positive multiple of {multiple}."
            )

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the plane of values: uint8 for int4 and for integers above a minimum."""
        return jnp.dtype("uint8" if self.values == "int4" or self.minimum else self.values)

    def num_groups(self, num_inputs: int) -> int:
        """Scales per row. Raises ValueError when `num_inputs` is not a whole number of groups."""
        unit = self.group_size or (INT4_BLOCK if self.values == "int4" else 1)
        if num_inputs % unit:
            raise ValueError(
                f"{num_inputs} inputs are not whole groups of {unit}; {self.values} "
                f"{_possible_groups(self.values, num_inputs)}."
            )
        return 1 if self.group_size is None else num_inputs // self.group_size


FP8 = Format("float8_e4m3fn", None)
"""One scale per output, as in FP8 checkpoints."""

MXFP4 = Format("float8_e4m3fn", 32, scale_dtype="bfloat16")
"""Holds every value of MXFP4 exactly: both its four-bit floats and its powers of two."""
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_E2M1 = _E2M1.astype(ml_dtypes.float8_e4m3fn)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeight:
    """A weight [out, in] in `format`.

    values [out, in], or uint8 [out, in / 2] for int4.
    scales [out, groups].
    minima [out, groups], or None for a format without.
    order int32 [orders, in], None unless the format is `ordered`: the input that each column is
        multiplied with. Several are of as many runs of rows, all of a length.
    """

    values: jax.Array
    scales: jax.Array
    minima: jax.Array | None
    format: Format = dataclasses.field(metadata={"static": True})
    order: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the weight."""
        num_outputs, columns = self.values.shape
        return num_outputs, columns * (2 if self.format.values == "int4" else 1)

    @property
    def unordered(self) -> QuantizedWeight:
        """The weight that takes inputs in its own order."""
        format = dataclasses.replace(self.format, ordered=False)
        return dataclasses.replace(self, format=format, order=None)


def abstract_weight(num_outputs: int, num_inputs: int, format: Format) -> QuantizedWeight:
    """The planes of a weight [num_outputs, num_inputs] as ShapeDtypeStructs.

    Raises ValueError when the inputs are not a whole number of groups.
    """
    groups = format.num_groups(num_inputs)
    columns = num_inputs // 2 if format.values == "int4" else num_inputs
    values = jax.ShapeDtypeStruct((num_outputs, columns), format.dtype)
    scales = jax.ShapeDtypeStruct((num_outputs, groups), jnp.dtype(format.scale_dtype))
    order = jax.ShapeDtypeStruct((1, num_inputs), jnp.int32) if format.ordered else None
    return QuantizedWeight(values, scales, scales if format.minimum else None, format, order)


def quantize(weight: jax.Array, format: Format) -> QuantizedWeight:
    """Quantize `weight` [out, in], finite and of a floating dtype, by rounding to nearest.

    Without a minimum, the largest magnitude of a group becomes 127, or 448 in float8_e4m3fn. In
    int4 the value of that magnitude becomes -8, with a scale of the opposite sign, as in GGUF: of
    the two extremes only the smaller is ever clipped, by one step at most. With a minimum, 0 and 15
    (or 255) are the group's extremes. Scales are rounded before values. An ordered
    format has the inputs as they are.

    Raises ValueError when the inputs are not a whole number of groups.
    """
    groups = format.num_groups(weight.shape[1])
    grouped = jnp.asarray(weight, jnp.float32).reshape(weight.shape[0], groups, -1)
    if format.minimum:
        least, most = grouped.min(-1, keepdims=True), grouped.max(-1, keepdims=True)
        low, high = 0, 15 if format.values == "int4" else 255
        minima = least.astype(format.scale_dtype)
        scales = (most - least) / high
        grouped = grouped - minima.astype(jnp.float32)
    elif format.values == "int4":
        low, high, minima = -8, 7, None
        at = jnp.argmax(jnp.abs(grouped), -1, keepdims=True)
        scales = jnp.take_along_axis(grouped, at, -1) / low
    else:
        high, minima = _LARGEST[format.values], None
        low = -high
        scales = jnp.max(jnp.abs(grouped), -1, keepdims=True) / high
    scales = scales.astype(format.scale_dtype)
    divisors = jnp.where(scales == 0, 1, scales).astype(jnp.float32)
    values = jnp.clip(grouped / divisors, low, high).reshape(weight.shape)
    if format.values != "float8_e4m3fn":
        values = jnp.round(values)
    if format.values == "int4":
        values = pack_int4(values.astype(jnp.int8) - low)
    values = values.astype(format.dtype)
    minima = None if minima is None else minima[..., 0]
    order = jnp.arange(weight.shape[1], dtype=jnp.int32)[None] if format.ordered else None
    return QuantizedWeight(values, scales[..., 0], minima, format, order)


def dequantize(weight: QuantizedWeight) -> jax.Array:
    """The weight [out, in] as float32, bit-exact with GGUF's dequantization."""
    if weight.order is not None:
        columns = jnp.argsort(weight.order, axis=1)[:, None]
        runs = dequantize(weight.unordered).reshape(len(columns), -1, weight.shape[1])
        return jnp.take_along_axis(runs, columns, axis=2).reshape(weight.shape)
    if weight.format.values != "int4":
        return scaled(weight, weight.values)
    low, high = (scaled(weight, half) for half in nibbles(weight))
    halves = [half.reshape(len(half), -1, 1, INT4_BLOCK // 2) for half in (low, high)]
    return jnp.concatenate(halves, 2).reshape(weight.shape)


def nibbles(weight: QuantizedWeight) -> tuple[jax.Array, jax.Array]:
    """The low and high halves of packed bytes, each [out, in / 2]: int8, or uint8 above a minimum.

    Low halves are the first 16 inputs of every block of 32, high halves the others.
    """
    halves = weight.values & 15, weight.values >> 4
    if weight.format.minimum:
        return halves
    return tuple(half.astype(jnp.int8) - 8 for half in halves)


def scaled(weight: QuantizedWeight, values: jax.Array) -> jax.Array:
    """Float32 [out, columns] of `values` [out, columns]: all of weight's or one nibble half."""
    grouped = values.astype(jnp.float32).reshape(*weight.scales.shape, -1)
    grouped = grouped * weight.scales.astype(jnp.float32)[..., None]
    if weight.minima is not None:
        grouped = grouped + weight.minima.astype(jnp.float32)[..., None]
    return grouped.reshape(values.shape)


def from_mxfp4(codes: np.ndarray, scales: np.ndarray) -> QuantizedWeight:
    """A weight in MXFP4 as planes of numpy arrays: codes uint8 [out, in], 0 to 15, and scales uint8
    [out, in / 32], exponents plus 127 and at most 254.

    Nothing is rounded.
    """
    least = np.uint16(1 << 6)  # 2^-127, which is subnormal
    powers = np.where(scales == 0, least, scales.astype(np.uint16) << 7).astype(np.uint16)
    return QuantizedWeight(_E2M1[codes], powers.view(ml_dtypes.bfloat16), None, MXFP4)


def from_integers(
    values: np.ndarray,
    scales: np.ndarray,
    minima: np.ndarray | None,
    format: Format,
    order: np.ndarray | None = None,
) -> QuantizedWeight:
    """A weight in any format as planes of numpy arrays: values [out, in], integers in the range of
    `format` or float8_e4m3fn; scales and minima [out, groups]; of an ordered format also the order
    of its inputs [1, in].

    Values are not rounded, scales and minima to `format.scale_dtype`. Raises ValueError when the
    inputs are not a whole number of groups.
    """
    format.num_groups(values.shape[1])
    if format.values == "int4":
        values = pack_int4(values if format.minimum else values + 8)
    scale_dtype = jnp.dtype(format.scale_dtype)
    planes = (None if plane is None else plane.astype(scale_dtype) for plane in (scales, minima))
    order = None if order is None else order.astype(np.int32)
    return QuantizedWeight(values.astype(format.dtype, copy=False), *planes, format, order)


def pack_int4(values):
    """Uint8 [out, in / 2] of integers 0 to 15 [out, in], an array of JAX or numpy."""
    blocks = values.astype(np.uint8).reshape(len(values), -1, 2, INT4_BLOCK // 2)
    return (blocks[:, :, 0] | blocks[:, :, 1] << 4).reshape(len(values), -1)


def _possible_groups(values, num_inputs):
    multiple = INT4_BLOCK if values == "int4" else 1
    divisors = [n for n in range(multiple, num_inputs + 1, multiple) if num_inputs % n == 0]
    useful = [str(n) for n in divisors if 16 <= n <= 256]
    if useful:
        return f"can have groups of {', '.join(useful)}"
    return f"can have groups of no size from 16 to 256: groups are multiples of {multiple}"
