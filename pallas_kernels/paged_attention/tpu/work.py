"""Work list of the TPU kernel: which tiles of queries attend to which rows' pages."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_NEVER = 2**31 - 1


class Items(NamedTuple):
    """A tile of queries and one row that has tokens in it, int32 [items] each.

    tile: index of the tile; items of a tile are consecutive. row: whose pages to read.
    first, last: the row's tokens within the tile, first <= token < last.
    since, until: positions visible to any of them are within since <= position < until; empty if
        there are none.
    all_since, all_until: range visible to every token of the tile; empty if some of the tile's
        tokens belong to other rows.
    """

    tile: jax.Array
    row: jax.Array
    first: jax.Array
    last: jax.Array
    since: jax.Array
    until: jax.Array
    all_since: jax.Array
    all_until: jax.Array


def work_list(
    begins: jax.Array, starts: jax.Array, lengths: jax.Array, limits: jax.Array
) -> tuple[Items, jax.Array]:
    """One item for each of `begins`, which ends at the next one or at its row's end.

    begins [items] int32: increasing tokens, including the first of each tile and of each row. Of
    equal ones all but the last get an empty item, and so do those past the last tile.
    starts, lengths [rows] int32: each row's tokens.
    limits [tiles, queries, 2] int32: since and until of each token.

    Returns the items, and [items + 1] int32: for each index up to len(begins), the first item from
    that index on that sees something, or len(begins).
    """
    tiles, queries, _ = limits.shape
    ends = jnp.append(begins[1:], tiles * queries)
    inside = (begins[:, None] >= starts) & (begins[:, None] < starts + lengths)
    row = jnp.argmax(inside, axis=1).astype(jnp.int32)
    ends = jnp.where(jnp.any(inside, axis=1), jnp.minimum(ends, (starts + lengths)[row]), begins)
    tile = jnp.minimum(lax.div(begins, queries), tiles - 1)
    first, last = begins - tile * queries, ends - tile * queries

    token = jnp.arange(queries)
    own = (token >= first[:, None]) & (token < last[:, None])
    since, until = limits[tile, :, 0], limits[tile, :, 1]
    sees = own & (since < until)
    end = jnp.max(jnp.where(sees, until, 0), axis=1)
    items = Items(
        tile=tile,
        row=row,
        first=first,
        last=last,
        since=jnp.minimum(jnp.min(jnp.where(sees, since, _NEVER), axis=1), end),
        until=end,
        all_since=jnp.max(jnp.where(own, since, _NEVER), axis=1),
        all_until=jnp.min(jnp.where(own, until, 0), axis=1),
    )
    index = jnp.arange(len(begins) + 1, dtype=jnp.int32)
    sees_something = jnp.append(items.until > items.since, True)
    following = lax.cummin(jnp.where(sees_something, index, len(begins)), reverse=True)
    return items, following
