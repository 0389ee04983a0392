"""Inputs of paged attention: pages, and which tokens belong to which row of a ragged batch."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp


class KVPages(NamedTuple):
    """Pages of one layer: k [pages, kv_heads, head_dim, page_size], v with the last two swapped.

    Both orders put the dimension that should be vectorized last: positions when computing scores
    from keys, features when computing outputs from values. Page 0 is the trash page: padding is
    written there and nothing reads it.
    """

    k: jax.Array
    v: jax.Array


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """Shape and dtype of the pages of one layer."""

    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: jnp.dtype

    @property
    def shapes(self) -> KVPages:
        """ShapeDtypeStructs of one layer's pages."""
        k = (self.num_pages, self.num_kv_heads, self.head_dim, self.page_size)
        v = (self.num_pages, self.num_kv_heads, self.page_size, self.head_dim)
        return KVPages(jax.ShapeDtypeStruct(k, self.dtype), jax.ShapeDtypeStruct(v, self.dtype))

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer, keys and values together."""
        items = 2 * self.num_kv_heads * self.head_dim * self.page_size
        return items * jnp.dtype(self.dtype).itemsize


class RaggedBatch(NamedTuple):
    """Which tokens belong to which row, and the pages of each row's context.

    Rows are sequences. The first `num_decodes` of them (static, given at the call) have exactly
    one token each, at the same index; the others own tokens `starts[r]` to `starts[r] + lengths[r]`
    of the flat batch, in increasing order of start. A padding row has context length 0.

    tables [rows, max_pages] int32: page table, the pages of each row in order; unused entries 0.
    context [rows] int32: tokens the row can see, its own new tokens included.
    starts [rows] int32, lengths [rows] int32: the row's tokens in the flat batch.
    """

    tables: jax.Array
    context: jax.Array
    starts: jax.Array
    lengths: jax.Array


class Visible(NamedTuple):
    """Visible range of each token: since <= position < until of its row, int32 [tokens] each.

    Neither limit decreases from one token of a row to the next. If since >= until, the range is
    empty; tokens of no row have until = 0.
    """

    since: jax.Array
    until: jax.Array
