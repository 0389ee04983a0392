"""How decode attention is cut into pieces that can be computed side by side (split-KV)."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

TILE = 64
"""Tokens that are attended to at once; a tile begins at a multiple of it."""


class Entry(NamedTuple):
    """Columns of the work list: a row's split, its tiles, and the positions the row sees.

    Those are since <= position < until.
    """

    row: jax.Array
    split: jax.Array
    first_tile: jax.Array
    tiles: jax.Array
    since: jax.Array
    until: jax.Array


def work_list(
    since: jax.Array, until: jax.Array, max_tiles: int, split_tiles: int, splits: int
) -> tuple[jax.Array, jax.Array]:
    """All splits of all rows that see positions since <= position < until, int32 [rows] each.

    A split has `split_tiles` tiles, doubled until a row has at most `splits` of them; its last one
    may have fewer. That depends on the row alone. No row may see more than `max_tiles`. A row with
    until = 0 has none, and no tile of a split is wholly invisible.

    Returns entries [rows * splits, 6] int32, columns of `Entry`, in order of rows and splits and
    then unused ones; and how many splits each row has [rows] int32.
    """
    first_tile = lax.div(since, TILE)
    tiles = jnp.where(until > 0, ceil_div(until, TILE) - first_tile, 0)
    doublings = max(0, math.ceil(math.log2(max_tiles / (split_tiles * splits))))
    sizes = jnp.array([split_tiles << n for n in range(doublings + 1)], jnp.int32)
    size = sizes[jnp.sum(tiles[:, None] > sizes[:-1] * splits, axis=1)]
    counts = ceil_div(tiles, size)
    # Rows are few: comparing all with all is one kernel, and a cumulative sum several.
    rows = jnp.arange(len(counts))
    ends = jnp.sum(jnp.where(rows <= rows[:, None], counts, 0), axis=1)
    index = jnp.arange(len(counts) * splits)
    row = jnp.minimum(jnp.sum(index[:, None] >= ends, axis=1), len(counts) - 1)
    split = index - (ends - counts)[row]
    done = split * size[row]
    entry = Entry(
        row=row,
        split=split,
        first_tile=first_tile[row] + done,
        tiles=jnp.minimum(size[row], tiles[row] - done),
        since=since[row],
        until=until[row],
    )
    return jnp.stack(entry, axis=1).astype(jnp.int32), counts


def ceil_div(numerator, divisor):
    """For integers that are not negative."""
    return (numerator + (divisor - 1)) // divisor
