"""Reference collective matmuls in float64 numpy, for all ranks together."""

from __future__ import annotations

import numpy as np


def all_gather_matmul(weights, xs):
    """Each rank's [out / n, tokens], of weights [out / n, in] and xs [in, tokens / n] by rank."""
    x = np.concatenate([np.asarray(x, np.float64) for x in xs], axis=1)
    return [np.asarray(weight, np.float64) @ x for weight in weights]


def matmul_reduce_scatter(weights, xs):
    """Each rank's [out, tokens / n], of weights [out, in / n] and xs [in / n, tokens] by rank."""
    products = [np.asarray(weight, np.float64) @ np.asarray(x) for weight, x in zip(weights, xs)]
    total = np.pad(sum(products), ((0, 0), (0, -xs[0].shape[1] % len(xs))))
    return np.split(total, len(xs), axis=1)
