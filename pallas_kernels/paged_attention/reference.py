"""Reference paged attention in float64 numpy and plain loops. Slow on purpose."""

from __future__ import annotations

import numpy as np

from pallas_kernels.paged_attention.layout import LatentPages


def paged_attention(
    q,
    pages,
    batch,
    *,
    num_decodes,
    scale,
    window=None,
    soft_cap=None,
    sinks=None,
    tree_mask=None,
    groups=None,
    k_scale=None,
    v_scale=None,
):
    """Same arguments and results as `api.paged_attention`, as numpy float64. Groups of decodes
    change nothing here."""

    def visible(row, token, context, length):
        """Positions that a row's token sees."""
        is_tree = row >= num_decodes and tree_mask is not None and length <= tree_mask.shape[1]
        if not is_tree:
            last = context - length + token
            first = 0 if window is None else max(0, last - window + 1)
            return np.arange(first, last + 1)
        committed = context - length
        mask = np.asarray(tree_mask)[int(batch.starts[row]) : int(batch.starts[row]) + length]
        depth = mask.sum(1) - 1
        depth_of = np.concatenate([np.arange(committed) - committed, depth[:length]])
        seen = np.concatenate([np.ones(committed, bool), mask[token, :length]])
        if window is not None:
            seen &= depth[token] - depth_of < window
        return np.flatnonzero(seen)

    return _attend(q, pages, batch, visible, num_decodes, scale, soft_cap, sinks, k_scale, v_scale)


def attend(q, pages, batch, visible, *, num_decodes, scale, soft_cap=None):
    """Same arguments and results as `api.attend`, as numpy float64."""

    def positions(row, token, context, length):
        index = int(batch.starts[row]) + token
        return np.arange(int(visible.since[index]), int(visible.until[index]))

    return _attend(q, pages, batch, positions, num_decodes, scale, soft_cap)


def _attend(
    q,
    pages,
    batch,
    visible,
    num_decodes,
    scale,
    soft_cap=None,
    sinks=None,
    k_scale=None,
    v_scale=None,
):
    q = np.asarray(q, np.float64)
    keys = _features(pages.k, axis=2)
    if isinstance(pages, LatentPages):
        values = keys[:, :, : pages.value_dim].swapaxes(2, 3)
    else:
        values = _features(pages.v, axis=3)
    if pages.scales is not None:
        scales = np.asarray(pages.scales, np.float64)
        keys, values = keys * scales[:, :, 0, None], values * scales[:, :, 1, :, None]
    if pages.k.dtype == np.uint8:
        rotation = _rotation(values.shape[3])
        keys, values = (keys.swapaxes(2, 3) @ rotation).swapaxes(2, 3), values @ rotation
    group, page_size = q.shape[1] // keys.shape[1], values.shape[2]
    out = np.zeros((*q.shape[:2], values.shape[3]))
    lse = np.full(q.shape[:2], -np.inf)
    for row, table in enumerate(np.asarray(batch.tables)):
        context = int(batch.context[row])
        start, length = int(batch.starts[row]), int(batch.lengths[row])
        if row < num_decodes:
            assert (start, length) == (row, 1)
        if not context:
            continue
        for token in range(length):
            seen = visible(row, token, context, length)
            if not len(seen):
                continue
            ids, offsets = table[seen // page_size], seen % page_size
            for head in range(q.shape[1]):
                kv_head = head // group
                k = keys[ids, kv_head, :, offsets]
                v = values[ids, kv_head, offsets]
                if k_scale is not None:
                    k = k * float(k_scale[kv_head])
                if v_scale is not None:
                    v = v * float(v_scale[kv_head])
                scores = k @ q[start + token, head] * scale
                if soft_cap is not None:
                    scores = soft_cap * np.tanh(scores / soft_cap)
                everything = scores if sinks is None else np.append(scores, float(sinks[head]))
                total = np.logaddexp.reduce(everything)
                out[start + token, head] = np.exp(scores - total) @ v
                lse[start + token, head] = total
    return out, lse


def _features(array, axis):
    array = np.asarray(array)
    if array.dtype == np.uint8:  # feature f in the low bits, and f + head_dim / 2 in the high ones
        array = np.concatenate([array % 16, array // 16], axis=axis) - 8.0
    return np.asarray(array, np.float64)


def _rotation(dim):
    block, size = np.ones((1, 1)), dim & -dim
    while len(block) < size:
        block = np.block([[block, block], [block, -block]])
    return np.kron(np.eye(dim // size), block / np.sqrt(size))
