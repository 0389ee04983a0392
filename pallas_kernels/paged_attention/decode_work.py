"""How decode attention is cut into pieces that can be computed side by side (split-KV).

A row's visible context is tiles of TILE tokens. They are cut into splits, and the splits of all
rows, in order, are numbered through: these numbers are entries of a work list that is never written
down. Only `ends` is, the number at which each row's entries end. What else there is to know of an
entry follows from it, wherever it is needed: its row by bisection, and its tiles by the same
arithmetic on scalars that counted them for all rows at once.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import ceil_div

TILE = 64
"""Tokens that are attended to at once; a tile begins at a multiple of it."""


class Cut(NamedTuple):
    """Of a row: its first tile, how many it has, how many of them a split has, and its splits."""

    first_tile: jax.Array
    tiles: jax.Array
    size: jax.Array
    splits: jax.Array


class Entry(NamedTuple):
    """A split of a row: the tiles it has, and the positions since <= position < until to see."""

    row: jax.Array
    split: jax.Array
    first_tile: jax.Array
    tiles: jax.Array
    since: jax.Array
    until: jax.Array


@dataclasses.dataclass(frozen=True)
class Cutting:
    """How rows are cut: into splits of `split_tiles`, doubled until there are at most `splits`.

    The last split of a row may have fewer tiles. What a row is cut into depends on what it sees
    alone, and not even on how many `tokens` its pages could hold.
    """

    tokens: int
    split_tiles: int
    splits: int

    @classmethod
    def of(cls, tokens: int, split_tokens: int, max_splits: int) -> Cutting:
        """Of rows of up to `tokens` into at most `max_splits`, or as many as could be."""
        return cls(tokens, split_tokens // TILE, min(-(-tokens // split_tokens), max_splits))

    def limits(self, since: Any, until: Any) -> tuple[Any, Any]:
        """What can be seen of positions since <= position < until."""
        return jnp.maximum(since, 0), jnp.minimum(until, self.tokens)

    def cut(self, since: Any, until: Any) -> Cut:
        """For int32 of any shape. Where since >= until there are no tiles and no splits.

        No tile is wholly invisible.
        """
        since, until = self.limits(since, until)
        first_tile = lax.div(since, TILE)
        tiles = jnp.where(since < until, ceil_div(until, TILE) - first_tile, 0)
        size = jnp.full_like(tiles, self.split_tiles)
        doublings = math.ceil(math.log2(self.tokens / (TILE * self.split_tiles * self.splits)))
        for _ in range(doublings):
            size = jnp.where(tiles > size * self.splits, 2 * size, size)
        return Cut(first_tile, tiles, size, ceil_div(tiles, size))

    def ends(self, since: jax.Array, until: jax.Array) -> jax.Array:
        """Entries of each row and those before it, int32 [rows], of int32 [rows] each."""
        counts = self.cut(since, until).splits
        # Rows are few: comparing all with all is one kernel, and a cumulative sum several.
        rows = jnp.arange(len(counts))
        return jnp.sum(jnp.where(rows <= rows[:, None], counts, 0), axis=1, dtype=jnp.int32)

    def entry(self, number: jax.Array, ends: Any, since: Any, until: Any, rows: int) -> Entry:
        """Entry `number`, which must be less than the last of `ends`.

        ends, since, until: int32 [rows], or references to such memory, read here and there.
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
