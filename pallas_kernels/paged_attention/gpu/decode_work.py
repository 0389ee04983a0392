"""Split-KV: how decode attention is split into pieces that are computed in parallel.

A row's visible context is tiles of TILE tokens. They are cut into splits, and the splits of all
rows are numbered in order: these numbers are entries of a work list that is never materialized.
Only `ends` is, the number at which each row's entries end. Kernels derive the rest of an entry from
its number: its row by bisection, and its tiles by scalar arithmetic, the same that counted them for
all rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import ceil_div

TILE = 64
"""Tokens that are attended to together; a tile begins at a multiple of it."""


def worker_of(block: Any, stream: Any, blocks: int) -> Any:
    """Number of a stream of a thread block, the units of which are every n-th of the work list.

    The first stream of every block comes before any second one: few units go to as many
    multiprocessors as there are.
    """
    return stream * blocks + block


class Cut(NamedTuple):
    """Per row: first tile, number of tiles, tiles per split, number of splits."""

    first_tile: jax.Array
    tiles: jax.Array
    size: jax.Array
    splits: jax.Array


class Entry(NamedTuple):
    """A split of a row: its tiles, and the visible positions since <= position < until."""

    row: jax.Array
    split: jax.Array
    first_tile: jax.Array
    tiles: jax.Array
    since: jax.Array
    until: jax.Array


@dataclasses.dataclass(frozen=True)
class Cutting:
    """How rows are cut: into splits of `split_tiles`, or of more for at most `splits` of them.

    The last split of a row may have fewer tiles. The splits of a row depend only on its visible
    range, not on `tokens`, the capacity of its page table.
    """

    tokens: int
    split_tiles: int
    splits: int

    @classmethod
    def of(cls, tokens: int, split_tokens: int, max_splits: int) -> Cutting:
        """For rows of up to `tokens`, with at most `max_splits` splits, or fewer if all fit."""
        return cls(tokens, split_tokens // TILE, min(-(-tokens // split_tokens), max_splits))

    def limits(self, since: Any, until: Any) -> tuple[Any, Any]:
        """Positions since <= position < until, limited to the capacity."""
        return jnp.maximum(since, 0), jnp.minimum(until, self.tokens)

    def cut(self, since: Any, until: Any) -> Cut:
        """For int32 of any shape. If since >= until there are no tiles and no splits.

        Every tile has a visible position.
        """
        since, until = self.limits(since, until)
        first_tile = lax.div(since, TILE)
        tiles = jnp.where(since < until, ceil_div(until, TILE) - first_tile, 0)
        size = jnp.maximum(self.split_tiles, ceil_div(tiles, self.splits))
        return Cut(first_tile, tiles, size, ceil_div(tiles, size))

    def ends(self, since: jax.Array, until: jax.Array) -> jax.Array:
        """Cumulative number of entries of the rows, int32 [rows], from int32 [rows] each."""
        counts = self.cut(since, until).splits
        # Rows are few: an all-pairs comparison is one kernel, a cumulative sum several.
        rows = jnp.arange(len(counts))
        return jnp.sum(jnp.where(rows <= rows[:, None], counts, 0), axis=1, dtype=jnp.int32)

    def entry(self, number: jax.Array, ends: Any, since: Any, until: Any, rows: int) -> Entry:
        """Entry `number`, which must be less than the last of `ends`.

        ends, since, until: int32 [rows], or references to such memory, read by element.
        """
        row = before = jnp.int32(0)
        for step in reversed(range(rows.bit_length())):
            probe = row + (1 << step)
            end = ends[jnp.minimum(probe, rows) - 1]
            beyond = (probe <= rows) & (end <= number)
            row, before = jnp.where(beyond, probe, row), jnp.where(beyond, end, before)
        cut = self.cut(since[row], until[row])
        split = number - before
        done = split * cut.size
        return Entry(
            row,
            split,
            cut.first_tile + done,
            jnp.minimum(cut.size, cut.tiles - done),
            *self.limits(since[row], until[row]),
        )
