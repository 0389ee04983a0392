"""The one signature of paged attention, and the shape of what it reads."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import xla


class KVPages(NamedTuple):
    """Pages of one layer: k [pages, kv_heads, head_dim, page_size], v with the last two swapped.

    Both orders put the dimension that a vector unit should run along last: positions when scores
    are made of keys, features when outputs are made of values. Page 0 is trash: padding writes
    there and nothing reads it.
    """

    k: jax.Array
    v: jax.Array


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """Everything needed to make the pages of one layer."""

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
    """Which tokens belong to which row, and where each row's context lies.

    Rows are sequences. The first `num_decodes` of them (static, given at the call) have exactly
    one token each, at the same index; the others own tokens `starts[r]` to `starts[r] + lengths[r]`
    of the flat batch, in increasing order of start. A padding row has context length 0.

    tables [rows, max_pages] int32: the pages of each row, in order; unused entries are 0.
    context [rows] int32: tokens the row can see, its own new tokens included.
    starts [rows] int32, lengths [rows] int32: the row's tokens in the flat batch.
    """

    tables: jax.Array
    context: jax.Array
    starts: jax.Array
    lengths: jax.Array


def paged_attention(
    q: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    *,
    num_decodes: int,
    scale: float,
    window: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Causal attention of each token over its row's pages.

    q [tokens, query_heads, head_dim]; query head h reads KV head h // (query_heads / kv_heads).
    A token at position p sees positions (p - window, p], or [0, p] without a window. The keys and
    values of the batch's own tokens must have been written (`write_kv`).

    Returns out [tokens, query_heads, head_dim] and lse [tokens, query_heads] float32, the
    log-sum-exp of the scaled scores, by which partial results merge. Tokens of no row, and rows
    with no context, get out = 0 and lse = -inf. What a row gets does not depend on the others.
    Raises ValueError when head counts do not divide.
    """
    if q.shape[1] % pages.k.shape[1]:
        raise ValueError(
            f"{q.shape[1]} query heads cannot be shared evenly among {pages.k.shape[1]} KV heads."
        )
    return xla.paged_attention(q, pages, batch, num_decodes, scale, window)


def write_kv(
    pages: KVPages,
    k: jax.Array,
    v: jax.Array,
    page_ids: jax.Array,
    offsets: jax.Array,
) -> KVPages:
    """Write k, v [tokens, kv_heads, head_dim] to (page_ids, offsets), int32 [tokens] each.

    In place when the pages are donated. An id outside the pool writes nothing.
    """
    return KVPages(*xla.write_kv(pages, k, v, page_ids, offsets))
