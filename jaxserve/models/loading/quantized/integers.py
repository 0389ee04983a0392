"""Small integers in 32-bit words: value i of a word's 32 / bits in its bits from bits * i on.

AWQ has eight outputs in a word, the even ones before the odd.
"""

from __future__ import annotations

import numpy as np

from jaxserve.core.arithmetic import cdiv

_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Of each of eight values, its place in a word."""


def per_word(bits: int) -> int:
    """Values of a word."""
    return 32 // bits


def words(window: slice, bits: int) -> slice:
    """The words that have the values of `window`."""
    return slice(window.start // per_word(bits), cdiv(window.stop, per_word(bits)))


def unpacked(
    packed: np.ndarray, window: slice, bits: int, axis: int, *, awq: bool = False
) -> np.ndarray:
    """Uint8 values of `window` along `axis`, of the 32-bit `words` [rows, columns] that have it."""
    count = per_word(bits)
    along = np.ascontiguousarray(np.moveaxis(packed, axis, -1)).astype("<i4", copy=False)
    octets = along.view(np.uint8)
    values = octets if bits == 8 else np.stack([octets & 15, octets >> 4], axis=-1)
    values = values.reshape(*along.shape, count)
    if awq:
        values = values[..., _AWQ_PLACES]
    values = values.reshape(*along.shape[:-1], -1)
    first = window.start // count * count
    return np.moveaxis(values[..., window.start - first : window.stop - first], -1, axis)
