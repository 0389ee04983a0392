"""Ragged paged attention on TPUs: one Mosaic TPU kernel for decodes and for chunks.

Tokens are arranged in tiles on a fixed grid: a decode's tile is its one token, a chunk's holds as
many as the rows have on average. For each KV head, the tokens of a tile times the query heads that
share the KV head are the rows of the kernel's matrix products. A work list says which tile attends
to which row's pages (`work`), and the kernel walks it (`kernel`). Tokens of other
rows in the same tile are also computed, and masked, so nothing is sorted or padded row by row. Only
queries and results are reordered, in XLA, next to the projections that write and read them.

The core's scalar memory (SMEM, 1 MiB) must hold the work list and the page tables. If the tables of
all rows are too large, rows are processed in groups: 8192 pages of 128 tokens, a context of a
million, are 32 KiB of ids, so a group has 16 such rows and nothing is refused.

On TPUs v4 and v5p, whose two cores are one device, each core takes one half of the KV heads: the
work is balanced whatever the rows are, one long row included.

Arithmetic behind the sizes (not measurements), for 8 KV heads of head_dim 128 in bfloat16, 4 query
heads each:

- A page of 128 tokens is 256 KiB of keys and 256 KiB of values, each contiguous and one copy.
- A block of 512 tokens is 2 MiB, and the ring of 8 MiB holds four, of which three are in flight.
  Hiding 1 us of memory latency takes 0.8 MB on v5e, 1.6 on v6e, 2.8 on v5p and 3.7 on tpu7x for
  each of its cores.
- With one KV head, as in tensor parallelism over 8 devices, a block has 2048 tokens, 1 MiB.
- A decode's block takes 1.28 us to arrive at the 1.64 TB/s of v6e, some 2200 cycles at 1.75 GHz.
  Compiled for v6e, its products and softmax are 713 instructions and its four copies some 120.
- A chunk's tile of 128 tokens makes 512 rows for each KV head. Against a block of 512 tokens that
  is 134 million operations, 646 instructions compiled for v6e: 40 % of its peak, of which products
  over a head_dim of 128 can reach one half, because a matrix unit is 256 deep.
- VMEM: the ring 8 MiB, queries and results twice each 4 MiB, running values 2 MiB, running peaks
  and totals 4 MiB, scores and weights of one head 1 MiB each: 20 of the 64 MiB that a core has at
  least (v5p, tpu7x). The limit of 48 MiB leaves room for float32, large pages and large groups.

Modelled on Ragged Paged Attention of jax.experimental.pallas.ops.tpu and tpu-inference, from which
it differs in the layout of pages, the tiles, and the single work list.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.tpu import kernel
from pallas_kernels.paged_attention.tpu.work import work_list

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.layout import KVPages, RaggedBatch, Visible

DTYPES = ("bfloat16", "float32")
QUANTIZED = ("int8", "float8_e4m3fn")
HEAD_DIMS = (64, 128, 256)
MAX_PAGE_SIZE = 1024
MAX_GROUP = 128
"""Query heads of a KV head."""

MAX_TABLE = 128 * 1024
"""Page ids in SMEM, 512 of its 1024 KiB."""

_MIN_QUERIES = 16  # a tile of bfloat16 has 16 rows


def unsupported(
    q: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    visible: Visible,
    *,
    num_decodes: int,
    scale: float,
    soft_cap: float | None = None,
    out_dtype: jnp.dtype | None = None,
    interpret: Any = None,
) -> str | None:
    """Why `paged_attention` refuses arrays of these shapes and dtypes, None if it does not.

    When interpreted it refuses nothing: the constraints on shapes come from a TPU's array layout.
    The last dimension of a page of keys is its tokens, and copies must begin at tiles of 128.
    """
    heads, head_dim = q.shape[1:]
    kv_heads, page_size = pages.k.shape[1], pages.k.shape[3]
    if interpret:
        return None
    if q.dtype.name not in DTYPES:
        return f"queries are {q.dtype}; they can be of {', '.join(DTYPES)}."
    for name, array in (("keys", pages.k), ("values", pages.v)):
        if array.dtype != q.dtype and array.dtype.name not in QUANTIZED:
            return (
                f"{name} are {array.dtype}; they can be of {', '.join((q.dtype.name, *QUANTIZED))}."
            )
    if head_dim not in HEAD_DIMS:
        return f"head_dim is {head_dim}; it can be one of {HEAD_DIMS}."
    if page_size % kernel.LANES or page_size > MAX_PAGE_SIZE:
        return (
            f"page_size is {page_size}; it can be a multiple of {kernel.LANES} "
            f"up to {MAX_PAGE_SIZE}."
        )
    if heads % kv_heads or heads // kv_heads > MAX_GROUP:
        return (
            f"{heads} query heads share {kv_heads} KV heads; each can have "
            f"a whole number of them up to {MAX_GROUP}."
        )
    if batch.tables.shape[1] > MAX_TABLE:
        return f"a row may have {batch.tables.shape[1]} pages; it can have up to {MAX_TABLE}."
    return None


def paged_attention(
    q: jax.Array,
    pages: KVPages,
    batch: RaggedBatch,
    visible: Visible,
    *,
    num_decodes: int,
    scale: float,
    soft_cap: float | None = None,
    out_dtype: jnp.dtype | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Same arguments and results as `xla.paged_attention`.

    interpret: None on TPUs. Elsewhere True, which compiles to XLA, or what
        `compat.tpu_interpreter` gives.

    Raises ValueError for what `unsupported` names.
    """
    reason = unsupported(
        q,
        pages,
        batch,
        visible,
        num_decodes=num_decodes,
        scale=scale,
        soft_cap=soft_cap,
        interpret=interpret,
    )
    if reason is not None:
        raise ValueError(reason)
    together = max(1, MAX_TABLE // batch.tables.shape[1])
    attend = functools.partial(
        _attend,
        pages=pages,
        scale=scale,
        soft_cap=soft_cap,
        out_dtype=out_dtype or q.dtype,
        interpret=interpret,
    )
    limits = jnp.stack(visible, axis=-1)
    parts = []
    for first in range(0, num_decodes, together):
        few = slice(first, min(first + together, num_decodes))
        index = jnp.arange(few.stop - few.start, dtype=jnp.int32)
        parts.append(
            attend(q[few], limits[few], batch.tables[few], index, jnp.ones_like(index), index, 1)
        )
    if len(q) > num_decodes:
        q, limits = q[num_decodes:], limits[num_decodes:]
        tokens, heads, _ = q.shape
        queries = _queries(tokens, len(batch.tables) - num_decodes, heads // pages.k.shape[1])
        out = jnp.zeros(q.shape, out_dtype or q.dtype)
        lse = jnp.full((tokens, heads), -jnp.inf, jnp.float32)
        for first in range(num_decodes, len(batch.tables), together):
            few = slice(first, first + together)
            lengths = batch.lengths[few]
            starts = jnp.where(lengths > 0, batch.starts[few] - num_decodes, tokens)
            begins = jnp.concatenate([jnp.arange(0, tokens, queries, dtype=jnp.int32), starts])
            part = attend(q, limits, batch.tables[few], starts, lengths, jnp.sort(begins), queries)
            # A token belongs to one row; all other groups give it (0, -inf).
            out, lse = out + part[0], jnp.maximum(lse, part[1])
        parts.append((out, lse))
    out, lse = zip(*parts)
    return jnp.concatenate(out), jnp.concatenate(lse)


def _queries(tokens, rows, group):
    """Tokens per tile: the average of a row, within limits."""
    queries = _MIN_QUERIES
    while queries * rows < tokens and 2 * queries * group <= kernel.QUERY_ROWS:
        queries *= 2
    return queries


def _attend(
    q,
    limits,
    tables,
    starts,
    lengths,
    begins,
    queries,
    *,
    pages,
    scale,
    soft_cap,
    out_dtype,
    interpret,
):
    """Arrange tokens in tiles of `queries`, call the kernel, and undo the arrangement."""
    tokens, heads, dim = q.shape
    kv_heads = pages.k.shape[1]
    tiles = -(-tokens // queries)
    padding = tiles * queries - tokens
    limits = jnp.pad(limits, ((0, padding), (0, 0))).reshape(tiles, queries, 2)
    items, following = work_list(begins, starts, lengths, limits)
    q = jnp.pad(q, ((0, padding), (0, 0), (0, 0)))
    q = q.reshape(tiles, queries, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)
    out, lse = kernel.attend(
        q.reshape(tiles, kv_heads, -1, dim),
        limits,
        pages,
        tables,
        items,
        following,
        scale=scale,
        soft_cap=soft_cap,
        out_dtype=out_dtype,
        interpret=interpret,
    )
    out = out.reshape(q.shape).transpose(0, 3, 1, 2, 4).reshape(-1, heads, dim)
    lse = lse.reshape(q.shape[:-1]).transpose(0, 3, 1, 2).reshape(-1, heads)
    return out[:tokens], lse[:tokens]
