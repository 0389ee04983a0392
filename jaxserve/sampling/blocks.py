"""How the vocabulary is cut up, so that sums over it are fast and always in one order.

Rows of weights lie in vocabulary order, padded to whole blocks. Sums are halvings written out as
additions of contiguous runs, which vectorize on every backend (on CPUs faster than a reduction),
and whose order is fixed: a reduction left to the compiler may round differently for another number
of rows, and then a token would depend on the company it was sampled in.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

BLOCK = 1024


def padded_vocab(vocab_size: int) -> int:
    """`vocab_size` rounded up to whole blocks."""
    return -(-vocab_size // BLOCK) * BLOCK


def ordered_sum(x: jax.Array, axis: int = -1) -> jax.Array:
    """Sum over an axis by pairwise halving, in an order fixed by the length of the axis alone."""
    while (length := x.shape[axis]) > 1:
        half = length // 2
        first, second, rest = jnp.split(x, [half, 2 * half], axis)
        x = jnp.concatenate([first + second, rest], axis)
    return jnp.squeeze(x, axis)


def keep(weights: jax.Array, floor: jax.Array) -> jax.Array:
    """Weights [rows, n] with those below floor [rows] set to zero."""
    return jnp.where(weights >= floor[:, None], weights, 0.0)


def take_cells(x: jax.Array, size: int, cells: jax.Array) -> jax.Array:
    """From x [rows, cells * size] each row's own `cells` int32 [rows, n], as [rows, n * size].

    Cells are runs of `size` consecutive tokens, copied whole: gathering token by token is slow.
    """
    rows, width = x.shape
    first = jnp.arange(rows, dtype=jnp.int32)[:, None] * (width // size)
    taken = x.reshape(-1, size).at[first + cells].get(mode="promise_in_bounds")
    return taken.reshape(rows, -1)
