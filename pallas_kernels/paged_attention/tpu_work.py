"""Which tiles of queries meet which rows' pages: the work list of the TPU kernel."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_NEVER = 2**31 - 1


class Items(NamedTuple):
    """A tile of queries and one row that has tokens in it, int32 [items] each.

    tile: which tile; items of a tile follow each other. row: whose pages.
    first, last: the row's tokens within the tile, first <= token < last.
    since, until: the positions that any of them sees lie in since <= position < until, which is
        empty where nobody sees anything.
    all_since, all_until: what every token of the tile sees of the row; nothing where some of the
        tile's tokens are not the row's.
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
    """One item for each of `begins`, which it reaches from to the next one or its row's end.

    begins [items] int32: increasing tokens, among them the first of each tile and of each row. Of
    equal ones all but the last get an empty item, and so do those past the last tile.
    starts, lengths [rows] int32: each row's tokens.
    limits [tiles, queries, 2] int32: since and until of each token.

    Returns the items, and for each index up to and including len(begins) the first item from there
    on that sees something, len(begins) where there is none: [items + 1] int32.
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
