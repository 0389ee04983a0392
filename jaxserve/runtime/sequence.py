"""Attention by the ranks of `seq`, which share every sequence.

Rank r of n has the r-th part of each page's tokens, so that a page table is the same for all and
any range of positions lies evenly on them. Decodes are computed by every rank, for their weights
must be read all the same. Of a step's prefill tokens each rank has an equal share, and what then
travels is the faster of two (Context Parallelism, 2411.01783; `choose_scheme`):

- queries: all ranks get them, attend to what they have themselves (KV-cache parallelism, Medha
  2409.17264), and send each share's results to whom it belongs;
- keys and values, around a ring, to queries that stay (Ring Attention, 2310.01889). The queries are
  dealt there and back, so that every rank has early and late ones. This is for one chunk that
  follows little context.

New keys and values are few, and in either case go to all ranks; each keeps those of its pages.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.runtime.batch import Addresses, StepLayout
from pallas_kernels.merge import merge_over, merge_scattered
from pallas_kernels.paged_attention import KVPages, write_kv
from pallas_kernels.ring_attention import Layout, kvp_partial, ring_paged_attention
from sharding_rules import SEQ


@dataclasses.dataclass(frozen=True)
class DealtTokens:
    """Which of a step's tokens a rank computes: every decode, and its share of the others."""

    layout: StepLayout

    @property
    def dealt(self) -> Layout:
        """Who has which prefill tokens, by their place in the step."""
        tokens, ranks = self.layout.key.prefill_tokens, self.layout.seq
        if self.layout.key.ring:
            return Layout(ranks, tokens // (2 * ranks), there_and_back=True)
        return Layout(ranks, max(1, tokens // ranks))

    @property
    def share(self) -> int:
        """Prefill tokens of a rank."""
        return self.layout.key.prefill_tokens // self.layout.seq

    def own(self, x: jax.Array) -> jax.Array:
        """This rank's of x [tokens, ...]."""
        rows = self.layout.key.rows
        places = self.dealt.position(lax.axis_index(SEQ), jnp.arange(self.share, dtype=jnp.int32))
        return jnp.concatenate([x[:rows], x[rows:][places]])

    def whole(self, x: jax.Array) -> jax.Array:
        """All tokens of x [own tokens, ...]."""
        rows = self.layout.key.rows
        if not self.share:
            return x
        dealt = lax.all_gather(x[rows:], SEQ, axis=0, tiled=True)
        if self.layout.key.ring:
            tokens = jnp.arange(self.layout.key.prefill_tokens, dtype=jnp.int32)
            dealt = dealt[self.dealt.places(tokens, self.share)]
        return jnp.concatenate([x[:rows], dealt])

    def pick(self, x: jax.Array, tokens: jax.Array) -> jax.Array:
        """x [features, own tokens] at the step's `tokens` int32 [n]: [features, n] on all ranks."""
        rows, rank = self.layout.key.rows, lax.axis_index(SEQ)
        of_prefill = jnp.maximum(tokens - rows, 0)
        owner = jnp.where(tokens < rows, 0, self.dealt.rank(of_prefill))
        place = jnp.where(tokens < rows, tokens, rows + self.dealt.before(owner, of_prefill))
        return lax.psum(jnp.where(owner == rank, x[:, place], 0), SEQ)


def attend(
    layout: StepLayout,
    addresses: Addresses,
    pages: KVPages,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    window: int | None,
) -> tuple[jax.Array, KVPages]:
    """Attention of this rank's tokens q, k, v [own tokens, heads, head_dim], k and v written first.

    Returns out [own tokens, query_heads, head_dim] and the pages.
    """
    tokens, rows = DealtTokens(layout), layout.key.rows
    page_size, rank = pages.k.shape[3], lax.axis_index(SEQ)
    mine = addresses.offsets // page_size == rank
    page_ids = jnp.where(mine, addresses.page_ids, -1)
    offsets = addresses.offsets % page_size
    heads = [x.shape[1] for x in (q, k, v)]
    splits = (heads[0], heads[0] + heads[1])
    if layout.key.ring:
        all_k, all_v = jnp.split(tokens.whole(jnp.concatenate([k, v], axis=1)), 2, axis=1)
        pages = write_kv(pages, all_k, all_v, page_ids, offsets)
        return _ring(layout, addresses, pages, q, scale, window), pages
    all_q, all_k, all_v = jnp.split(
        tokens.whole(jnp.concatenate([q, k, v], axis=1)), splits, axis=1
    )
    pages = write_kv(pages, all_k, all_v, page_ids, offsets)
    out, lse = kvp_partial(
        all_q,
        pages,
        addresses.batch,
        axis_name=SEQ,
        num_decodes=rows,
        scale=scale,
        window=window,
    )
    parts = []
    if rows:
        parts.append(merge_over(SEQ, out[:rows], lse[:rows])[0])
    if tokens.share:
        parts.append(merge_scattered(SEQ, out[rows:], lse[rows:])[0])
    return jnp.concatenate(parts), pages


def _ring(layout, addresses, pages, q, scale, window):
    """Decodes as ever, and the one chunk by keys that travel."""
    rows, batch, dealt = layout.key.rows, addresses.batch, DealtTokens(layout).dealt
    decodes = jax.tree.map(lambda array: array[:rows], batch)
    parts = []
    if rows:
        partial = kvp_partial(
            q[:rows], pages, decodes, axis_name=SEQ, num_decodes=rows, scale=scale, window=window
        )
        parts.append(merge_over(SEQ, *partial)[0])
    chunk = slice(rows, rows + 1)
    out, _ = ring_paged_attention(
        q[None, rows:],
        pages,
        batch.tables[chunk, : layout.ring_pages],
        batch.context[chunk],
        batch.lengths[chunk],
        dealt,
        axis_name=SEQ,
        scale=scale,
        window=window,
        scheme=layout.ring_scheme,
    )
    return jnp.concatenate([*parts, out[0]])
