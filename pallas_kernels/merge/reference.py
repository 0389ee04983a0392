"""Reference merge in float64 numpy: a softmax over partials, one query and head at a time."""

from __future__ import annotations

import numpy as np


def merge(outs, lses):
    """Same arguments and results as `api.merge`, as numpy float64."""
    outs, lses = np.asarray(outs, np.float64), np.asarray(lses, np.float64)
    out = np.zeros(outs.shape[1:])
    lse = np.full(lses.shape[1:], -np.inf)
    for at in np.ndindex(lse.shape):
        present = [part for part in range(len(lses)) if lses[(part, *at)] > -np.inf]
        if not present:
            continue
        peak = max(lses[(part, *at)] for part in present)
        weights = {part: np.exp(lses[(part, *at)] - peak) for part in present}
        total = sum(weights.values())
        out[at] = sum(weights[part] / total * outs[(part, *at)] for part in present)
        lse[at] = peak + np.log(total)
    return out, lse
