"""Self-check case of paged attention: a small random batch of the same kind as the call."""

from __future__ import annotations

import numpy as np

from pallas_kernels.paged_attention.layout import KVPages, RaggedBatch, Visible
from pallas_kernels.self_check import CheckCase, eps, random_like

_DECODES = ((1, 400), (70, 400), (0, 400), (1000, 800), (1300, None), (5000, 3000))
"""Contexts of the rows with one token, and the windows of what they see, in tokens. Besides these
there is a long one: in all they are cut into many splits, some rows into one and some into all."""
_LONGEST = 16_380
_LONGEST_OF_ALL_HEADS = 2**17
"""Tokens of the long row: for one KV head or a few, and times KV heads."""
_CHUNKS = ((150, 150, None), (600, 3, 400), (300, 90, 100), (260, 40, None))
"""Contexts, new tokens and windows of the other rows. One window ends within a tile that other
tokens of the same block see nothing of."""
_TOLERANCE = 4 * eps("bfloat16")
"""For any dtype: on some devices even float32 products default to bfloat16 passes."""


def shapes_class(
    q, pages, batch, visible, *, num_decodes, scale, soft_cap=None, out_dtype=None
) -> str:
    """Everything static that selects the machine code, except batch sizes."""
    has = {"decode": num_decodes, "prefill": len(q) - num_decodes}
    scaled = "" if pages.scales is None else "scaled "
    return (
        f"{'+'.join(part for part, count in has.items() if count)}, "
        f"{q.dtype} on {scaled}{pages.k.dtype} pages of {pages.k.shape[3]}, "
        f"heads {q.shape[1]}/{pages.k.shape[1]}, head_dim {q.shape[2]}"
        f"{'' if soft_cap is None else ', soft cap'}"
        f"{'' if out_dtype in (None, q.dtype) else f', results {out_dtype}'}"
    )


def check_case(arguments, options, rng) -> CheckCase:
    """As described in `self_check.CheckCase`."""
    q, pages, *_ = arguments
    _, kv_heads, _, page_size = pages.k.shape
    rows = []
    if options["num_decodes"]:
        longest = min(_LONGEST, _LONGEST_OF_ALL_HEADS // kv_heads)
        rows += [(context, 1, window) for context, window in (*_DECODES, (longest, None))]
    num_decodes = len(rows)
    if len(q) > options["num_decodes"]:
        rows += _CHUNKS
    contexts, lengths = (np.int32([row[n] for row in rows]) for n in (0, 1))
    starts = np.cumsum(lengths, dtype=np.int32) - lengths
    needed = -(-contexts // page_size)
    num_pages = 1 + int(needed.sum())
    tables = np.zeros((len(contexts), int(needed.max())), np.int32)
    free = 1 + rng.permutation(num_pages - 1).astype(np.int32)
    for row, count in enumerate(needed):
        tables[row, :count], free = free[:count], free[count:]
    until = [np.arange(context - new, context) + 1 for context, new, _ in rows]
    since = [
        np.maximum(ends - (window or context), 0) for ends, (context, _, window) in zip(until, rows)
    ]
    until = np.maximum(np.concatenate(until), 0).astype(np.int32)
    since = np.concatenate(since).astype(np.int32)

    small = KVPages(
        *(random_like(rng, (num_pages, *x.shape[1:]), x.dtype) for x in (pages.k, pages.v))
    )
    if pages.scales is not None:
        scales = rng.uniform(0.5, 2, (num_pages, *pages.scales.shape[1:]))
        small = small._replace(scales=scales.astype(np.float32))
    queries = random_like(rng, (len(until), *q.shape[1:]), q.dtype)
    batch = RaggedBatch(tables, contexts, starts, lengths)
    options = {**options, "num_decodes": num_decodes}
    if pages.k.dtype == np.int8:  # int8 elements are too large to attend to unscaled
        options["scale"] /= np.iinfo(np.int8).max / 10
    return CheckCase(
        (queries, small, batch, Visible(since, until)),
        options,
        _TOLERANCE,
    )
