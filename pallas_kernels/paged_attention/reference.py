"""What paged attention means, in float64 numpy and plain loops. Slow on purpose."""

from __future__ import annotations

import numpy as np


def paged_attention(q, pages, batch, *, num_decodes, scale, window=None):
    """Same arguments and results as `api.paged_attention`, as numpy float64."""
    q = np.asarray(q, np.float64)
    keys, values = np.asarray(pages.k, np.float64), np.asarray(pages.v, np.float64)
    group, page_size = q.shape[1] // keys.shape[1], values.shape[2]
    out = np.zeros(q.shape)
    lse = np.full(q.shape[:2], -np.inf)
    for row, table in enumerate(np.asarray(batch.tables)):
        context = int(batch.context[row])
        start, length = int(batch.starts[row]), int(batch.lengths[row])
        if row < num_decodes:
            assert (start, length) == (row, 1)
        if not context:
            continue
        where = [(table[p // page_size], p % page_size) for p in range(context)]
        k = np.stack([keys[page, :, :, offset] for page, offset in where])
        v = np.stack([values[page, :, offset, :] for page, offset in where])
        for token in range(length):
            last = context - length + token
            first = 0 if window is None else max(0, last - window + 1)
            for head in range(q.shape[1]):
                kv_head = head // group
                scores = k[first : last + 1, kv_head] @ q[start + token, head] * scale
                peak = scores.max()
                weights = np.exp(scores - peak)
                out[start + token, head] = weights @ v[first : last + 1, kv_head] / weights.sum()
                lse[start + token, head] = peak + np.log(weights.sum())
    return out, lse
