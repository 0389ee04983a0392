"""Attention of prefill chunks to their own tokens, by keys and values that are on no pages.

The batch's keys and values are cut into blocks, which are pages that all chunks share: each chunk
sees a range of them. Merged with attention to the positions before the chunks, by log-sum-exp, it
is the causal attention of the chunks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import xla
from pallas_kernels.paged_attention.layout import KVPages, RaggedBatch, Visible
from pallas_kernels.paged_attention.masks import causal, owners


def before_chunks(batch: RaggedBatch, num_tokens: int, window: int | None) -> Visible:
    """What each token of a batch without decodes sees of the positions before its row's tokens."""
    since, until = causal(batch, num_tokens, 0, window, None)
    first = (batch.context - batch.lengths)[owners(batch, num_tokens).row]
    return Visible(jnp.minimum(since, first), jnp.minimum(until, first))


def attend_within_chunks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Partial causal attention of each token to the tokens of its row in this batch, which has no
    decodes; its tables are not read.

    q [tokens, heads, dim], k [tokens, kv_heads, dim], v [tokens, kv_heads, value_dim]. Returns out
    [tokens, heads, value_dim] and lse [tokens, heads], both float32, empty for tokens of no row.
    """
    row, index, owned = owners(batch, len(q))
    start = batch.starts[row]
    since = start if window is None else start + jnp.maximum(index + 1 - window, 0)
    until = jnp.where(owned, start + index + 1, 0)
    visible = Visible(jnp.minimum(since, until), until)

    size = min(xla.PREFILL_BLOCK, len(q))
    k, v = (xla.padded_to(array, 0, size) for array in (k, v))
    k, v = (array.reshape(-1, size, *array.shape[1:]) for array in (k, v))
    pages = KVPages(k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3))
    pages_of_row = jnp.arange(len(k), dtype=jnp.int32)
    shared = jnp.broadcast_to(pages_of_row, (len(batch.starts), len(k)))
    rows = batch._replace(tables=shared)
    # No kernel takes values of fewer features than keys.
    return xla.paged_attention(
        q,
        pages,
        rows,
        visible,
        num_decodes=0,
        scale=scale,
        soft_cap=soft_cap,
        out_dtype=jnp.dtype(jnp.float32),
    )
