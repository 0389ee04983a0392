"""Self-check case of paged attention: a small random batch of the same kind as the call."""

from __future__ import annotations

import numpy as np

from pallas_kernels.paged_attention.layout import KVPages, RaggedBatch, Visible
from pallas_kernels.self_check import CheckCase, eps, random_like

_DECODES = (1, 70, 0, 700)
"""Contexts of the rows with one token, in tokens."""
_CHUNKS = ((150, 150), (600, 3), (300, 90))
"""Contexts and new tokens of the other rows."""
_TOLERANCE = 4 * eps("bfloat16")
"""For any dtype: on some devices even float32 products default to bfloat16 passes."""


def shapes_class(q, pages, batch, visible, *, num_decodes, scale, soft_cap=None) -> str:
    """Everything static that selects the machine code, except batch sizes."""
    has = {"decode": num_decodes, "prefill": len(q) - num_decodes}
    return (
        f"{'+'.join(part for part, count in has.items() if count)}, "
        f"{q.dtype} on {pages.k.dtype} pages of {pages.k.shape[3]}, "
        f"heads {q.shape[1]}/{pages.k.shape[1]}, head_dim {q.shape[2]}"
        f"{'' if soft_cap is None else ', soft cap'}"
    )


def check_case(arguments, options, rng) -> CheckCase:
    """As described in `self_check.CheckCase`."""
    q, pages, *_ = arguments
    page_size = pages.k.shape[3]
    decodes = _DECODES if options["num_decodes"] else ()
    chunks = _CHUNKS if len(q) > options["num_decodes"] else ()
    contexts = np.int32([*decodes, *(context for context, _ in chunks)])
    lengths = np.int32([1] * len(decodes) + [new for _, new in chunks])
    starts = np.cumsum(lengths, dtype=np.int32) - lengths
    needed = -(-contexts // page_size)
    num_pages = 1 + int(needed.sum())
    tables = np.zeros((len(contexts), int(needed.max())), np.int32)
    free = 1 + rng.permutation(num_pages - 1).astype(np.int32)
    for row, count in enumerate(needed):
        tables[row, :count], free = free[:count], free[count:]
    until = [np.arange(context - new, context) + 1 for context, new in zip(contexts, lengths)]
    until = np.maximum(np.concatenate(until), 0).astype(np.int32)
    since = np.maximum(until - 400, 0).astype(np.int32)  # a window, so both ends are masked

    small = KVPages(
        *(random_like(rng, (num_pages, *array.shape[1:]), array.dtype) for array in pages)
    )
    queries = random_like(rng, (len(until), *q.shape[1:]), q.dtype)
    batch = RaggedBatch(tables, contexts, starts, lengths)
    options = {**options, "num_decodes": len(decodes)}
    if pages.k.dtype == np.int8:  # int8 elements are too large to attend to unscaled
        options["scale"] /= np.iinfo(np.int8).max / 10
    return CheckCase(
        (queries, small, batch, Visible(since, until)),
        options,
        _TOLERANCE,
    )
