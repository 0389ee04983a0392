"""Reference of the sum and its norm in float64 numpy, without any rounding."""

from __future__ import annotations

import numpy as np


def add_and_norm(x, parts, weight, *, eps):
    """Same arguments and results as `api.add_and_norm`, as numpy float64."""
    x, parts, weight = (np.asarray(array, np.float64) for array in (x, parts, weight))
    added = x + parts.sum(axis=0)
    mean = np.mean(added * added, axis=-1, keepdims=True)
    return added, added / np.sqrt(mean + eps) * weight
