"""Reference for quantized weights and their products, in float64 numpy."""

from __future__ import annotations

import numpy as np


def dequantize(weight):
    """Float64 [out, in] of a QuantizedWeight."""
    values = np.asarray(weight.values)
    if weight.format.values == "int4":
        values = np.concatenate([_unpacked(block) for block in _blocks_of_16(values)], axis=1)
        values = values if weight.format.minimum else values - 8
    values = values.astype(np.float64)
    group = weight.format.group_size or values.shape[1]
    values *= np.repeat(np.asarray(weight.scales, np.float64), group, axis=1)
    if weight.format.minimum:
        values += np.repeat(np.asarray(weight.minima, np.float64), group, axis=1)
    return values


def quantized_matmul(weight, x):
    """Same arguments as `api.quantized_matmul`; float64 [tokens, out]."""
    return np.asarray(x, np.float64) @ dequantize(weight).T


def _blocks_of_16(packed):
    return [packed[:, at : at + 16] for at in range(0, packed.shape[1], 16)]


def _unpacked(block):
    """Integers 0 to 15 [out, 32] of bytes [out, 16]: all low halves, then all high ones."""
    return np.concatenate([block % 16, block // 16], axis=1).astype(np.int64)
