"""Array helpers shared by several operations."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Arrays = TypeVar("Arrays")


def ceil_div(numerator, divisor):
    """For non-negative integers; jnp's floor division adds code for signs."""
    return lax.div(numerator + (divisor - 1), divisor)


def as_bits(array: jax.Array) -> jax.Array:
    """The same bits as unsigned integers, which no compiler rounds.

    XLA has no small floats on CPUs: even a slice of them converts the whole sliced array.
    """
    return lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))


def send(arrays: Arrays, hop: int, axis_name: str | tuple[str, ...]) -> Arrays:
    """Send `arrays` `hop` ranks up and receive those of the rank `hop` below. Wraps around."""
    ranks = lax.axis_size(axis_name)
    pairs = [(rank, (rank + hop) % ranks) for rank in range(ranks)]
    return jax.tree.map(lambda array: lax.ppermute(array, axis_name, pairs), arrays)
