"""MXFP4 (OCP Microscaling Formats 1.0): 32 four-bit floats that share a power of two.

Files have `blocks`, uint8 [..., 16], byte i of which holds value 2i in its low half and 2i + 1 in
its high half, and `scales`, uint8 [...], each an exponent plus 127. A value has a sign, two bits of
exponent and one of mantissa; any of its products with a scale but the very largest is a bfloat16.
"""

from __future__ import annotations

import numpy as np

from jaxserve.core.errors import WeightsError
from pallas_kernels.quantized_matmul import QuantizedWeight, from_mxfp4

GROUP, GROUP_BYTES = 32, 16
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
_PAIRS = np.stack([_VALUES[np.arange(256) & 15], _VALUES[np.arange(256) >> 4]], axis=-1)
"""The two values of every byte."""
_BIAS, _NAN = 127, 255


def dequantize(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Float32 [..., groups * 32] of blocks [..., groups, 16] and scales [..., groups], exactly.

    Raises WeightsError for a scale that is not a number.
    """
    _check(scales)
    powers = np.ldexp(np.float32(1), scales.astype(np.int32) - _BIAS)
    values = _PAIRS[blocks].reshape(*scales.shape, GROUP)
    values *= powers[..., None]
    return values.reshape(*scales.shape[:-1], -1)


def packed(blocks: np.ndarray, scales: np.ndarray) -> QuantizedWeight:
    """The weight of blocks [out, groups, 16] and scales [out, groups], as devices keep it.

    Raises WeightsError as `dequantize` does.
    """
    _check(scales)
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1)
    return from_mxfp4(codes.reshape(len(blocks), -1), scales)


def packed_from_gguf(rows: np.ndarray) -> QuantizedWeight:
    """The weight of a GGUF tensor's rows, uint8 [out, row_bytes] in blocks of a scale and 16 bytes,
    whose low halves come before all high ones.

    Raises WeightsError as `dequantize` does.
    """
    blocks = rows.reshape(len(rows), -1, 1 + GROUP_BYTES)
    _check(scales := blocks[..., 0])
    codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
    return from_mxfp4(codes.reshape(len(rows), -1), scales)


def _check(scales: np.ndarray) -> None:
    if (scales == _NAN).any():
        raise WeightsError("an MXFP4 scale is 255, which is not a number; fetch the file again.")
