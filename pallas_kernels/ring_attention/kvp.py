"""Replicated queries; each rank attends to its own pages (KV-cache parallelism, Medha 2409.17264).

Page j of every sequence is on rank j % ranks, as that rank's page j // ranks of the sequence. The
keys of every query are then split evenly over the ranks, to within a page, whatever its position; a
sequence grows by a page on one rank after the other; and no page ever moves. Queries are few, one
token per decode row or a prefill chunk, so they are replicated on all ranks. Results are merged by
one maximum and one sum over the ranks: (head_dim + 2) * 4 bytes per token and head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backends import Backend
from pallas_kernels.merge import merge_over
from pallas_kernels.paged_attention import Pages, RaggedBatch, Visible, attend, masks
from pallas_kernels.ring_attention.layout import round_robin


def kvp_attention(
    q: jax.Array,
    pages: Pages,
    batch: RaggedBatch,
    *,
    axis_name: str | tuple[str, ...],
    num_decodes: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    backend: Backend = "auto",
) -> tuple[jax.Array, jax.Array]:
    """`paged_attention` with each sequence's pages split over one or several mesh axes.

    For use inside `jax.shard_map`. Arguments are those of `paged_attention` and the same on every
    rank, except two: `pages` is the rank's own pool, and `batch.tables` holds the rank's own pages
    of each row, in order. A row too short to have a page on a rank has an empty table there.

    Returns out and lse as `paged_attention` does, the same on every rank. Elements of pages without
    scales are used as they are.
    """
    partial = kvp_partial(
        q,
        pages,
        batch,
        axis_name=axis_name,
        num_decodes=num_decodes,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        backend=backend,
    )
    out, lse = merge_over(axis_name, *partial)
    return out.astype(q.dtype), lse


def kvp_partial(
    q: jax.Array,
    pages: Pages,
    batch: RaggedBatch,
    *,
    axis_name: str | tuple[str, ...],
    num_decodes: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    backend: Backend = "auto",
) -> tuple[jax.Array, jax.Array]:
    """This rank's partial of `kvp_attention`, for the caller to merge over the ranks.

    Returns out [tokens, query_heads, value_dim] and lse [tokens, query_heads], both float32, of the
    rank's own pages.
    """
    layout, rank = (
        round_robin(pages.k.shape[3], lax.axis_size(axis_name)),
        lax.axis_index(axis_name),
    )
    everywhere = masks.causal(batch, len(q), num_decodes, window, None)
    here = Visible(*(layout.before(rank, limit) for limit in everywhere))
    return attend(
        q,
        pages,
        batch,
        here,
        num_decodes=num_decodes,
        scale=scale,
        soft_cap=soft_cap,
        backend=backend,
    )


def kvp_slots(
    tables: jax.Array,
    rows: jax.Array,
    positions: jax.Array,
    *,
    page_size: int,
    axis_name: str | tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    """Slot mapping of `write_kv` on this rank: page_ids and offsets, int32 [tokens] each.

    tables [rows, pages]: the rank's own pages of each row. rows, positions [tokens] int32: each
    token's row and its position in the sequence. The id is -1, which writes nothing, for tokens
    whose page is on another rank or not in the table.
    """
    layout, rank = round_robin(page_size, lax.axis_size(axis_name)), lax.axis_index(axis_name)
    index = layout.before(rank, positions)
    page_ids = tables.at[rows, index // page_size].get(mode="fill", fill_value=-1)
    return jnp.where(layout.rank(positions) == rank, page_ids, -1), index % page_size
