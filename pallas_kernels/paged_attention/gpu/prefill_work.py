"""How prefill attention is cut into work units: blocks of a row's tokens, longest first.

A block is as many consecutive tokens of one row as a kernel processes together. It begins at a
multiple of ALIGNMENT, as hardware copies require, so that the first block of a row may contain
tokens of the previous row, and its last one those of the next: these see nothing there, and their
results are never read.

Blocks are sorted by the number of tiles they walk, so that workers that each take the longest
remaining block finish at about the same time.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.arrays import ceil_div
from pallas_kernels.paged_attention.layout import RaggedBatch, Visible
from pallas_kernels.paged_attention.masks import owners

ALIGNMENT = 8
"""In tokens: a tile of shared memory has eight rows."""


class Block(NamedTuple):
    """Columns of the work list: a block's row, its first token, and what its tokens see.

    They see positions within since <= position < until. The block walks `tiles` tiles from
    `first_tile` on; tiles `whole` to `rest` - 1 of these are seen in full by all of its tokens that
    see anything.
    """

    row: jax.Array
    start: jax.Array
    since: jax.Array
    until: jax.Array
    first_tile: jax.Array
    tiles: jax.Array
    whole: jax.Array
    rest: jax.Array


class Work(NamedTuple):
    """Blocks in order, and the place of each token.

    blocks: int32 [capacity, 8], columns of `Block`; the first `count` of them are used.
    limits: int32 [capacity, 2, tokens of a block], since and until of each, counted from the
        beginning of the first tile; 0 and 0 for a token that sees nothing or is not the row's.
    count: int32 [1].
    number, offset: int32 [tokens], a token's block and its index there.
    sees: bool [tokens], whether a token is in a block and sees anything.
    """

    blocks: jax.Array
    limits: jax.Array
    count: jax.Array
    number: jax.Array
    offset: jax.Array
    sees: jax.Array


def work_list(
    batch: RaggedBatch, visible: Visible, *, size: int, tile: int, end: int, positions: int
) -> Work:
    """All tokens of all rows, in blocks of `size` tokens that end at `end` at the latest.

    size and end: multiples of ALIGNMENT, end at least `size` and the number of tokens. positions:
    capacity of a row; nothing beyond is seen. Every block has a token that sees something, and a
    block walks the tiles of `tile` positions from the first visible one to the last.
    """
    rows, tokens = len(batch.starts), len(visible.since)
    lead = lax.rem(batch.starts, ALIGNMENT)
    counts = jnp.where(batch.lengths > 0, ceil_div(lead + batch.lengths, size), 0)
    # An all-pairs comparison is one kernel; a cumulative sum or a sort would be several.
    index = jnp.arange(rows)
    ends = jnp.sum(jnp.where(index <= index[:, None], counts, 0), axis=1)
    begins = ends - counts

    # Blocks in the order of rows.
    capacity = (tokens + min(rows, tokens) * (size + ALIGNMENT - 2)) // size
    number = jnp.arange(capacity)
    row = jnp.minimum(jnp.sum(number[:, None] >= ends, axis=1), rows - 1)
    start = (batch.starts - lead)[row] + (number - begins[row]) * size
    start = jnp.minimum(start, end - size)
    token = start[:, None] + jnp.arange(size)
    inside = (token >= batch.starts[row, None]) & (number < ends[-1])[:, None]
    inside &= token < (batch.starts + batch.lengths)[row, None]
    since, until = (limit.at[token].get(mode="fill", fill_value=0) for limit in visible)
    since, until = jnp.maximum(since, 0), jnp.minimum(until, positions)
    sees = inside & (since < until)
    lowest = jnp.min(jnp.where(sees, since, positions), axis=1)
    highest = jnp.max(jnp.where(sees, until, 0), axis=1)
    some = highest > 0
    first_tile = jnp.where(some, lax.div(lowest, tile), 0)
    tiles = jnp.where(some, ceil_div(highest, tile) - first_tile, 0)
    limits = jnp.stack([since, until], axis=1) - (first_tile * tile)[:, None, None]
    limits = jnp.where(sees[:, None], limits, 0)
    all_until = jnp.min(jnp.where(sees, limits[:, 1], positions), axis=1)
    block = Block(
        row=row,
        start=start,
        since=lowest,
        until=highest,
        first_tile=first_tile,
        tiles=tiles,
        whole=ceil_div(jnp.max(limits[:, 0], axis=1), tile),
        rest=lax.div(all_until, tile),
    )

    # Sort, longest first.
    ahead = (tiles > tiles[:, None]) | ((tiles == tiles[:, None]) & (number < number[:, None]))
    rank = jnp.sum(ahead, axis=1)
    order = jnp.zeros_like(rank).at[rank].set(number, unique_indices=True)

    row, index, owned = owners(batch, tokens)
    block_of = begins[row] + lax.div(lead[row] + index, size)
    return Work(
        blocks=jnp.stack(block, axis=1).astype(jnp.int32)[order],
        limits=limits[order],
        count=jnp.sum(some, keepdims=True, dtype=jnp.int32),
        number=rank[block_of],
        offset=jnp.arange(tokens) - start[block_of],
        sees=owned & (jnp.maximum(visible.since, 0) < jnp.minimum(visible.until, positions)),
    )
