"""What several operations do to arrays in the same way."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Arrays = TypeVar("Arrays")


def ceil_div(numerator, divisor):
    """For integers that are not negative; jnp's floor division minds signs at some length."""
    return lax.div(numerator + (divisor - 1), divisor)


def as_bits(array: jax.Array) -> jax.Array:
    """The same bits as unsigned integers, which no compiler thinks of rounding.

    XLA has no small floats on CPUs: even to slice them it converts what they are sliced from.
    """
    return lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))


def send(arrays: Arrays, hop: int, axis_name: str | tuple[str, ...]) -> Arrays:
    """What the rank `hop` below this one has of `arrays`; this one's go as far up. Wraps around."""
    ranks = lax.axis_size(axis_name)
    pairs = [(rank, (rank + hop) % ranks) for rank in range(ranks)]
    return jax.tree.map(lambda array: lax.ppermute(array, axis_name, pairs), arrays)
