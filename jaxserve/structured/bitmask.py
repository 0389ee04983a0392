"""How a set of tokens is laid out in bits: the same on the host and on the device.

Token t is bit t % 32, the lowest first, of int32 word t // 32.
"""

from __future__ import annotations

WORD_BITS = 32


def mask_words(vocab_size: int) -> int:
    """Words that hold a bit for each token."""
    return -(-vocab_size // WORD_BITS)
