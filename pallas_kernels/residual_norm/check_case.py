"""Self-check case of residual additions with norms: a few random tokens."""

from __future__ import annotations

import numpy as np

from pallas_kernels.self_check import CheckCase, eps, random_like

_TOKENS = 9


def shapes_class(x, parts, weight, **options) -> str:
    """Dtypes, and what the kernel is unrolled for."""
    return f"{x.dtype} hidden {x.shape[1]}, {len(parts)} parts {parts.dtype}"


def check_case(arguments, options, rng) -> CheckCase:
    """As many features and parts as the call. Sums in another order round to neighbours, twice."""
    x, parts, weight = arguments
    hidden, n = x.shape[1], len(parts)
    small = random_like(rng, (n, _TOKENS, hidden), parts.dtype) / np.sqrt(n).astype(parts.dtype)
    return CheckCase(
        (
            random_like(rng, (_TOKENS, hidden), x.dtype),
            small.astype(parts.dtype),
            random_like(rng, weight.shape, weight.dtype),
        ),
        options,
        4 * eps(x.dtype),
    )
