"""A small pool, and tokens to write to it, for the first use of kernels that write keys and values.

Decodes whose places in their pages are odd and even, first and last; a chunk that begins within a
page, fills the next and ends in a third; tokens of pages outside the pool.
"""

from __future__ import annotations

import numpy as np

from pallas_kernels.paged_attention.layout import KVPages
from pallas_kernels.trust import Trial, random_like

_OUTSIDE = (-1, 2**31 - 1)


def shapes_class(pages, k, v, page_ids, offsets) -> str:
    """What a page looks like."""
    _, kv_heads, head_dim, page_size = pages.k.shape
    return f"{pages.k.dtype} pages of {page_size}, {kv_heads} heads, head_dim {head_dim}"


def trial(arguments, options, rng) -> Trial:
    """As `trust.Trial` has it. Written bits are equal or wrong."""
    pages = arguments[0]
    page_size = pages.k.shape[3]
    decodes = [0, page_size - 1, page_size // 2, page_size // 3]
    chunk = np.arange(page_size - page_size // 5, 2 * page_size + page_size // 3 + 1)
    needed = len(decodes) + chunk[-1] // page_size + 1
    # Page 0 is trash, and only there may pools differ: it gets nothing.
    free = 1 + rng.permutation(needed)
    ids = [*free[: len(decodes)], *_OUTSIDE, *free[len(decodes) + chunk // page_size]]
    offsets = [*decodes, *[0] * len(_OUTSIDE), *chunk % page_size]
    small = KVPages(
        *(random_like(rng, (1 + needed, *array.shape[1:]), array.dtype) for array in pages)
    )
    new = (
        random_like(rng, (len(ids), *array.shape[1:]), pool.dtype)
        for array, pool in zip(arguments[1:3], pages)
    )
    return Trial((small, *new, np.int32(ids), np.int32(offsets)), options, 0.0)
