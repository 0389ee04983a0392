"""How far results are from exact ones."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def in_rows(found: jax.Array, exact: jax.Array) -> jax.Array:
    """The largest difference, relative to the root mean square of its row of exact values.

    A row runs along the last axis. Attention to n random values is about n ** -0.5 in size: a
    difference must be seen beside its neighbours, not beside 1. A row that is exactly 0 must be
    found so.
    """
    found, exact = found.astype(jnp.float32), exact.astype(jnp.float32)
    size = jnp.sqrt(jnp.mean(exact**2, axis=-1, keepdims=True))
    return absolute(found / jnp.where(size > 0, size, 1e-30), exact / jnp.where(size > 0, size, 1))


def absolute(found: jax.Array, exact: jax.Array) -> jax.Array:
    """The largest difference, NaN where anything is; infinities must be the same."""
    found, exact = found.astype(jnp.float32), exact.astype(jnp.float32)
    return jnp.max(jnp.where(found == exact, 0, jnp.abs(found - exact)))


def differing(found: Any, exact: Any) -> jax.Array:
    """How many elements of two trees of arrays differ in any bit."""

    def count(found, exact):
        bits = jnp.dtype(f"uint{8 * found.dtype.itemsize}")
        unequal = lax.bitcast_convert_type(found, bits) != lax.bitcast_convert_type(exact, bits)
        return jnp.sum(unequal, dtype=jnp.float32)

    return sum(jax.tree.leaves(jax.tree.map(count, found, exact)), jnp.float32(0))
