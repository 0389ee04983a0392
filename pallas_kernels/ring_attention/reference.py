"""Reference for context-parallel attention: unsharded attention in float64 numpy."""

from __future__ import annotations

import numpy as np


def attention(q, k, v, *, scale, causal=True, window=None, soft_cap=None):
    """q [new, query_heads, head_dim], the last of the tokens of k, v [tokens, kv_heads, head_dim].

    Returns out and lse as `api.ring_attention` does, of one unsharded sequence.
    """
    q, k, v = (np.asarray(array, np.float64) for array in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(array, group, axis=1) for array in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    behind = np.arange(len(k) - len(q), len(k))[:, None] - np.arange(len(k))
    if causal:
        scores = np.where(behind >= 0, scores, -np.inf)
    if window is not None:
        scores = np.where(behind < window, scores, -np.inf)
    peak = scores.max(-1, keepdims=True, initial=-1e30)
    weights = np.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    out = np.einsum("hqk,khd->qhd", weights / total, v)
    return out, (peak + np.log(total))[..., 0].T
