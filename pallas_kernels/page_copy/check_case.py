"""Self-check case of page copies: a small pool and page ids."""

from __future__ import annotations

import jax
import numpy as np

from pallas_kernels.page_copy.rows import row_dtype, row_elements
from pallas_kernels.self_check import CheckCase, random_like

_NUM_PAGES = 7
_PAGES = np.int32([3, -1, 6, _NUM_PAGES, 1])
"""Unordered, two of them outside the pool."""


def shapes_class(layers, page_ids, staging=None) -> str:
    """Dtype and shape of one page of one layer."""
    _, kv_heads, head_dim, page_size = layers[0].k.shape
    scaled = "" if layers[0].scales is None else "scaled "
    dtype = layers[0].k.dtype
    return f"{scaled}{dtype} pages of {page_size}, {kv_heads} heads, head_dim {head_dim}"


def check_case(arguments, options, rng) -> CheckCase:
    """Two layers; to scatter, random staging. Copies are bit-exact: tolerance 0."""
    layers, _, *staging = arguments
    small = jax.tree.map(
        lambda array: random_like(rng, (_NUM_PAGES, *array.shape[1:]), array.dtype),
        list(layers[:2]),
    )
    if staging:
        staging = [random_like(rng, (len(_PAGES), row_elements(small)), row_dtype(small))]
    return CheckCase((small, _PAGES, *staging), options, 0.0)
