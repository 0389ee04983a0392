"""Self-check case of KV writes: a small pool and tokens to write.

Decodes at odd and even, first and last offsets in their pages; a chunk that begins within a page,
fills the next and ends in a third; tokens of pages outside the pool.
"""

from __future__ import annotations

import numpy as np

from pallas_kernels.paged_attention.layout import KVPages
from pallas_kernels.self_check import CheckCase, random_like

_OUTSIDE = (-1, 2**31 - 1)


def shapes_class(pages, k, v, page_ids, offsets) -> str:
    """Dtype and shape of a page."""
    _, kv_heads, head_dim, page_size = pages.k.shape
    return f"{pages.k.dtype} pages of {page_size}, {kv_heads} heads, head_dim {head_dim}"


def check_case(arguments, options, rng) -> CheckCase:
    """As described in `self_check.CheckCase`. Writes are bit-exact: tolerance 0."""
    pages = arguments[0]
    page_size = pages.k.shape[3]
    decodes = [0, page_size - 1, page_size // 2, page_size // 3]
    chunk = np.arange(page_size - page_size // 5, 2 * page_size + page_size // 3 + 1)
    needed = len(decodes) + chunk[-1] // page_size + 1
    # Pools may differ in page 0, the trash page, so it is not written.
    free = 1 + rng.permutation(needed)
    ids = [*free[: len(decodes)], *_OUTSIDE, *free[len(decodes) + chunk // page_size]]
    offsets = [*decodes, *[0] * len(_OUTSIDE), *chunk % page_size]
    pool = pages.k, pages.v
    small = KVPages(
        *(random_like(rng, (1 + needed, *array.shape[1:]), array.dtype) for array in pool)
    )
    new = (
        random_like(rng, (len(ids), *array.shape[1:]), own.dtype)
        for array, own in zip(arguments[1:3], pool)
    )
    return CheckCase((small, *new, np.int32(ids), np.int32(offsets)), options, 0.0)
