"""Sending along the ring, and what a rank starts from."""

from __future__ import annotations

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Arrays = TypeVar("Arrays")


def send(arrays: Arrays, hop: int, axis_name: str | tuple[str, ...]) -> Arrays:
    """What the rank `hop` below this one has of `arrays`; this one's go as far up. Wraps around."""
    ranks = lax.axis_size(axis_name)
    pairs = [(rank, (rank + hop) % ranks) for rank in range(ranks)]
    return jax.tree.map(lambda array: lax.ppermute(array, axis_name, pairs), arrays)


def empty_partial(q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention of q [tokens, heads, head_dim] to nothing yet, float32 for the parts to come."""
    return jnp.zeros(q.shape, jnp.float32), jnp.full(q.shape[:2], -jnp.inf, jnp.float32)
