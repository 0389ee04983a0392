"""Reference collective matmuls in float64 numpy, for all ranks together."""

from __future__ import annotations

import numpy as np


def all_gather_matmul(weights, xs):
    """Each rank's [tokens, out / n], of weights [out / n, in] and xs [tokens / n, in] by rank."""
    x = np.concatenate([np.asarray(x, np.float64) for x in xs])
    return [x @ np.asarray(weight, np.float64).T for weight in weights]


def matmul_reduce_scatter(weights, xs):
    """Each rank's [tokens / n, out], of weights [out, in / n] and xs [tokens, in / n] by rank."""
    products = [np.asarray(x) @ np.asarray(weight, np.float64).T for weight, x in zip(weights, xs)]
    total = np.pad(sum(products), ((0, -len(xs[0]) % len(xs)), (0, 0)))
    return np.split(total, len(xs))
