"""The row of a page: everything that the pool has under one page id, as one row of elements."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def row_dtype(layers: Any) -> jnp.dtype:
    """Dtype of the elements: that of all arrays, or uint8 if they have several, as those of pages
    with scales. `layers` is any tree of arrays, or only of their shapes."""
    dtypes = {array.dtype for array in jax.tree.leaves(layers)}
    return jnp.dtype(dtypes.pop() if len(dtypes) == 1 else jnp.uint8)


def row_elements(layers: Any) -> int:
    """Number of elements; `layers` as for `row_dtype`."""
    return sum(elements_of_each(layers))


def elements_of_each(layers: Any) -> list[int]:
    """Number of elements of each array, in order."""
    itemsize = row_dtype(layers).itemsize
    return [
        math.prod(array.shape[1:]) * array.dtype.itemsize // itemsize
        for array in jax.tree.leaves(layers)
    ]


def to_pages(parts: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Parts of rows [n, elements] as pages [n, *shape] of `dtype`."""
    each = dtype.itemsize // parts.dtype.itemsize
    shape = (len(parts), *shape, each) if each > 1 else (len(parts), *shape)
    return lax.bitcast_convert_type(parts.reshape(shape), dtype)


def to_elements(pages: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Pages [n, ...] as parts of rows [n, elements] of `dtype`."""
    return lax.bitcast_convert_type(pages, dtype).reshape(len(pages), -1)
