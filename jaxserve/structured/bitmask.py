"""Bitmask layout of a set of tokens, on the host and on the device.

Token t is bit t % 32, lowest bit first, of int32 word t // 32.
"""

from __future__ import annotations

import numpy as np

from jaxserve.core.arithmetic import cdiv

WORD_BITS = 32


def mask_words(vocab_size: int) -> int:
    """Number of int32 words for one bit per token."""
    return cdiv(vocab_size, WORD_BITS)


def packed(tokens: np.ndarray) -> np.ndarray:
    """The mask int32 [words] of bool [words * WORD_BITS]: whether each token is in the set."""
    return np.packbits(tokens, bitorder="little").view(np.int32)


def has_token(mask: np.ndarray, token_id: int) -> bool:
    """Whether a mask int32 [words] has the bit of a token."""
    return bool(mask[token_id // WORD_BITS] >> token_id % WORD_BITS & 1)
