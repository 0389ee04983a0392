"""Quantised blocks decoded one value at a time, after the C reference of ggml's block layouts."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np


def _half(block: bytes, at: int) -> float:
    return struct.unpack_from("<e", block, at)[0]


def q8_0(b: bytes) -> list[float]:
    return [_half(b, 0) * q for q in struct.unpack_from("<32b", b, 2)]


def q4_0(b: bytes) -> list[float]:
    return [_half(b, 0) * (q - 8) for q in _nibbles(b[2:18])]


def q4_1(b: bytes) -> list[float]:
    return [_half(b, 0) * q + _half(b, 2) for q in _nibbles(b[4:20])]


def q5_0(b: bytes) -> list[float]:
    (high,) = struct.unpack_from("<I", b, 2)
    values = enumerate(_nibbles(b[6:22]))
    return [_half(b, 0) * ((q | (high >> i & 1) << 4) - 16) for i, q in values]


def q5_1(b: bytes) -> list[float]:
    (high,) = struct.unpack_from("<I", b, 4)
    values = enumerate(_nibbles(b[8:24]))
    return [_half(b, 0) * (q | (high >> i & 1) << 4) + _half(b, 2) for i, q in values]


def q4_k(b: bytes) -> list[float]:
    return _k_blocks(b, b[16:], high=bytes(32))


def q5_k(b: bytes) -> list[float]:
    return _k_blocks(b, b[48:], high=b[16:48])


def q6_k(b: bytes) -> list[float]:
    low, high, scales = b[:128], b[128:192], struct.unpack_from("<16b", b, 192)
    out = [0.0] * 256
    for half in range(2):
        for i in range(32):
            bits = high[32 * half + i]
            first, second = low[64 * half + i], low[64 * half + 32 + i]
            for quarter, nibble in enumerate((first & 15, second & 15, first >> 4, second >> 4)):
                at = 128 * half + 32 * quarter + i
                value = (nibble | (bits >> 2 * quarter & 3) << 4) - 32
                out[at] = _half(b, 208) * scales[at // 16] * value
    return out


def mxfp4(b: bytes) -> list[float]:
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    values = [-magnitudes[q - 8] if q > 7 else magnitudes[q] for q in _nibbles(b[1:17])]
    return [2.0 ** (b[0] - 127) * value for value in values]


def _nibbles(packed: bytes) -> list[int]:
    return [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]


def _k_blocks(b: bytes, packed: bytes, high: bytes) -> list[float]:
    """Eight sub-blocks of 32 values, each with a six-bit scale and a six-bit minimum."""
    s = b[4:16]
    out = []
    for j in range(8):
        if j < 4:
            scale, minimum = s[j] & 63, s[j + 4] & 63
        else:
            scale = s[j + 4] & 15 | s[j - 4] >> 6 << 4
            minimum = s[j + 4] >> 4 | s[j] >> 6 << 4
        for i in range(32):
            byte = packed[32 * (j // 2) + i]
            value = (byte >> 4 if j % 2 else byte & 15) | (high[i] >> j & 1) << 4
            out.append(_half(b, 0) * scale * value - _half(b, 2) * minimum)
    return out


# Name: (decoder, values a block, bytes a block, where its float16 scales are)
BLOCKS: dict[str, tuple[Callable[[bytes], list[float]], int, int, tuple[int, ...]]] = {
    "Q8_0": (q8_0, 32, 34, (0,)),
    "Q4_0": (q4_0, 32, 18, (0,)),
    "Q4_1": (q4_1, 32, 20, (0, 2)),
    "Q5_0": (q5_0, 32, 22, (0,)),
    "Q5_1": (q5_1, 32, 24, (0, 2)),
    "MXFP4": (mxfp4, 32, 17, ()),
    "Q4_K": (q4_k, 256, 144, (0, 2)),
    "Q5_K": (q5_k, 256, 176, (0, 2)),
    "Q6_K": (q6_k, 256, 210, (208,)),
}


def random_blocks(name: str, rows: int, columns: int) -> np.ndarray:
    """Random bytes [rows, row_bytes] with finite scales."""
    _, values, size, halves = BLOCKS[name]
    rng = np.random.default_rng(len(name) + size)
    blocks = rng.integers(0, 256, (rows * columns // values, size), np.uint8)
    for at in halves:
        scales = rng.normal(size=len(blocks)).astype("<f2")
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":
        blocks[:, 0] = rng.integers(110, 140, len(blocks))
    return blocks.reshape(rows, -1)


def decode(name: str, blocks: np.ndarray) -> np.ndarray:
    """Float64 [rows, columns] of bytes [rows, row_bytes]."""
    decoder, _, size, _ = BLOCKS[name]
    flat = [decoder(block.tobytes()) for block in blocks.reshape(-1, size)]
    return np.array(flat).reshape(len(blocks), -1)
