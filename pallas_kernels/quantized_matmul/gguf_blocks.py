"""GGUF's blocks as planes of quantized weights, without rounding.

A block type is `scale * value`, or `scale * value + minimum`, of integers. K-quants have scales of
6 or 8 bits times a float16 of 256 inputs: their product is exact in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pallas_kernels.quantized_matmul.formats import (
    INT4_BLOCK,
    Format,
    QuantizedWeight,
    pack_int4,
)

GGUF = {
    "Q8_0": Format("int8", 32, scale_dtype="float16"),
    "Q4_0": Format("int4", 32, scale_dtype="float16"),
    "Q4_1": Format("int4", 32, minimum=True, scale_dtype="float16"),
    "Q5_0": Format("int8", 32, scale_dtype="float16"),
    "Q5_1": Format("int8", 32, minimum=True, scale_dtype="float16"),
    "Q4_K": Format("int4", 32, minimum=True),
    "Q5_K": Format("int8", 32, minimum=True),
    "Q6_K": Format("int8", 16),
}
"""GGUF block types that stay quantized, by their GGUF names. Values of 5 and 6 bits take 8."""


class _Planes(NamedTuple):
    """Values [blocks, inputs], packed in int4, and scales and minima [blocks, groups]."""

    values: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None = None


def from_gguf(blocks: np.ndarray, kind: str) -> QuantizedWeight:
    """The rows of a GGUF tensor, uint8 [out, row_bytes] as stored, as planes of numpy arrays.

    Nothing is rounded. `kind` is a key of `GGUF`. Raises ValueError for any other, and for rows
    that are not whole blocks.
    """
    if kind not in GGUF:
        raise ValueError(f"{kind} does not stay quantized; {', '.join(GGUF)} do.")
    format, (size, read) = GGUF[kind], _READ[kind]
    if blocks.shape[1] % size:
        raise ValueError(f"Rows of {blocks.shape[1]} bytes are not whole {kind} blocks of {size}.")

    def of_rows(plane: np.ndarray | None, dtype: np.dtype | str) -> np.ndarray | None:
        if plane is None:
            return None
        return np.ascontiguousarray(plane.reshape(len(blocks), -1)).astype(dtype, copy=False)

    values, scales, minima = read(np.ascontiguousarray(blocks).reshape(-1, size))
    return QuantizedWeight(
        of_rows(values, format.dtype),
        of_rows(scales, format.scale_dtype),
        of_rows(minima, format.scale_dtype),
        format,
    )


def _halves(blocks: np.ndarray, at: int, count: int = 1) -> np.ndarray:
    """Float16 [blocks, count] from byte `at` on."""
    return np.ascontiguousarray(blocks[:, at : at + 2 * count]).view("<f2")


def _q8_0(blocks: np.ndarray) -> _Planes:
    return _Planes(blocks[:, 2:].view(np.int8), _halves(blocks, 0))


def _q4_0(blocks: np.ndarray) -> _Planes:
    return _Planes(blocks[:, 2:], _halves(blocks, 0))


def _q4_1(blocks: np.ndarray) -> _Planes:
    return _Planes(blocks[:, 4:], _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: np.ndarray) -> _Planes:
    return _Planes(_five_bits(blocks[:, 2:]).view(np.int8) - np.int8(16), _halves(blocks, 0))


def _q5_1(blocks: np.ndarray) -> _Planes:
    return _Planes(_five_bits(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _five_bits(blocks: np.ndarray) -> np.ndarray:
    """Uint8 [blocks, 32]: the fifth bits are in four bytes before those of the other four."""
    fifth = np.unpackbits(blocks[:, :4], axis=1, bitorder="little")
    low = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return low | fifth << 4


def _q4_k(blocks: np.ndarray) -> _Planes:
    values = _nibbles_of_64(blocks[:, 16:]).reshape(-1, INT4_BLOCK)
    return _Planes(pack_int4(values).reshape(len(blocks), -1), *_scales_and_minima(blocks))


def _q5_k(blocks: np.ndarray) -> _Planes:
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    fifth = blocks[:, None, 16:48] >> shifts & 1
    values = _nibbles_of_64(blocks[:, 48:]) | fifth << 4
    return _Planes(values, *_scales_and_minima(blocks))


def _q6_k(blocks: np.ndarray) -> _Planes:
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([[0], [4]], np.uint8) & 15
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    values = low.reshape(-1, 2, 4, 32) | high << 4
    scales = blocks[:, 192:208].view(np.int8) * _halves(blocks, 208).astype(np.float32)
    return _Planes(values.view(np.int8) - np.int8(32), scales)


def _nibbles_of_64(packed: np.ndarray) -> np.ndarray:
    """Uint8 [blocks, 8, 32]: 32 bytes hold 32 inputs in their low halves and the next 32 in their
    high ones."""
    packed = packed.reshape(len(packed), -1, 1, 32)
    return (packed >> np.array([[0], [4]], np.uint8) & 15).reshape(len(packed), -1, 32)


def _scales_and_minima(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float32 [blocks, 8] each, of six bits in twelve bytes, times a float16 each."""
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    whole = _halves(blocks, 0, 2).astype(np.float32)
    return whole[:, :1] * scales, -(whole[:, 1:] * minima)


_READ: dict[str, tuple[int, Callable[[np.ndarray], _Planes]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
"""Bytes of a block, and what reads blocks uint8 [blocks, bytes]."""
