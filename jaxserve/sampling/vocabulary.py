"""Memory layout of the vocabulary, and sums over it in a fixed order.

A rank of a mesh has `count` consecutive tokens of the vocabulary (models/parallel.py); arrays over
the vocabulary are padded to whole cells of CELL tokens on each rank. Sums are pairwise halvings,
written as additions of contiguous runs, which vectorize on every backend (on CPUs faster than a
reduction) and have a fixed order: a compiler's reduction may round differently for another number
of rows, and a token would then depend on the batch size. The exception is the mass that top_p keeps
on GPUs (threshold.py): there rounding can decide about a token at the edge of the nucleus.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.core.arithmetic import cdiv

CELL = 64
"""Consecutive tokens that searches handle together."""


def padded(count: int) -> int:
    """`count` tokens rounded up to whole cells."""
    return cdiv(count, CELL) * CELL


def ordered_sum(x: jax.Array) -> jax.Array:
    """Sum over the last axis by pairwise halving, in an order that depends only on its length."""
    while (length := x.shape[-1]) > 1:
        half = length // 2
        first, second, rest = jnp.split(x, [half, 2 * half], axis=-1)
        x = jnp.concatenate([first + second, rest], axis=-1)
    return x[..., 0]


def take_cells(x: jax.Array, cells: jax.Array) -> jax.Array:
    """From x [rows, n * CELL] each row's own `cells` int32 [rows, m], as [rows, m * CELL].

    Cells are copied whole: gathering token by token is slow.
    """
    rows, width = x.shape
    first = jnp.arange(rows, dtype=jnp.int32)[:, None] * (width // CELL)
    taken = x.reshape(-1, CELL).at[first + cells].get(mode="promise_in_bounds")
    return taken.reshape(rows, -1)


def largest(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest value of each row of x [rows, n * CELL], and its index int32 [rows], the lowest
    on ties.

    Finds the best cell first, then the index in it: XLA's argmax, which carries an index with every
    value, is two to five times slower on CPUs.
    """
    cell_max = jnp.max(x.reshape(x.shape[0], -1, CELL), axis=2)
    cell = jnp.argmax(cell_max, axis=1).astype(jnp.int32)
    members = take_cells(x, cell[:, None])
    place = cell * CELL + jnp.argmax(members, axis=1).astype(jnp.int32)
    return jnp.max(cell_max, axis=1), place


def largest_few(x: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """The `num` largest values of each row of x [rows, n], in descending order, and their indices
    int32, the lowest first on ties: [rows, num] each.

    They are in the `num` cells with the largest maxima: two selections from few, where one from all
    would be a sort of whole rows on GPUs.
    """
    rows, width = x.shape
    if width <= num * CELL:
        return lax.top_k(x, num)
    x = jnp.pad(x, ((0, 0), (0, padded(width) - width)), constant_values=-jnp.inf)
    _, cells = lax.top_k(jnp.max(x.reshape(rows, -1, CELL), axis=2), num)
    cells = jnp.sort(cells, axis=1)  # So that of equal values the lowest index comes first.
    values, places = lax.top_k(take_cells(x, cells), num)
    cell = jnp.take_along_axis(cells, places // CELL, axis=1)
    return values, cell * CELL + places % CELL
