"""Context-parallel attention: the ranks of `seq` split the KV of every sequence.

Rank r of n holds the r-th part of each page's tokens, so all ranks have the same page tables and
any range of positions is spread evenly. Every rank computes all decodes, since their weights must
be read anyway. A step's prefill tokens are split evenly over the ranks, and communication uses the
faster of two schemes (Context Parallelism, 2411.01783; `choose_scheme`):

- pass queries: every rank gathers all queries, attends to its own KV (KV-cache parallelism, Medha
  2409.17264), and sends the results to the ranks that own the queries;
- pass keys and values around a ring, to queries that stay (Ring Attention, 2310.01889). Queries are
  distributed in zigzag order, so that every rank has early and late ones. This is for one chunk
  that follows little context.

New keys and values are few: either way all ranks gather them, and each writes its part.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.runtime.programs.layout.step_inputs import SlotMapping
from jaxserve.runtime.programs.layout.step_layout import StepLayout
from pallas_kernels.merge import merge_over, merge_scattered, merge_sinks
from pallas_kernels.paged_attention import LatentPages, Pages, write_kv
from pallas_kernels.ring_attention import (
    Layout,
    kvp_partial,
    ring_paged_attention,
)
from sharding_rules import SEQ


@dataclasses.dataclass(frozen=True)
class ShardedTokens:
    """Which of a step's tokens a rank computes: every decode, and its share of prefill tokens."""

    layout: StepLayout

    @property
    def sharded(self) -> Layout:
        """Assignment of prefill tokens to ranks, by index in the step."""
        tokens, ranks = self.layout.key.prefill_tokens, self.layout.seq
        if self.layout.key.ring:
            return Layout(ranks, tokens // (2 * ranks), there_and_back=True)
        return Layout(ranks, max(1, tokens // ranks))

    @property
    def share(self) -> int:
        """Prefill tokens per rank."""
        return self.layout.key.prefill_tokens // self.layout.seq

    def own(self, x: jax.Array) -> jax.Array:
        """This rank's part of x [tokens, ...]."""
        rows = self.layout.key.decode_tokens
        places = self.sharded.position(lax.axis_index(SEQ), jnp.arange(self.share, dtype=jnp.int32))
        return jnp.concatenate([x[:rows], x[rows:][places]])

    def whole(self, x: jax.Array) -> jax.Array:
        """All tokens of x [own tokens, ...]."""
        rows = self.layout.key.decode_tokens
        if not self.share:
            return x
        sharded = lax.all_gather(x[rows:], SEQ, axis=0, tiled=True)
        if self.layout.key.ring:
            tokens = jnp.arange(self.layout.key.prefill_tokens, dtype=jnp.int32)
            sharded = sharded[self.sharded.places(tokens, self.share)]
        return jnp.concatenate([x[:rows], sharded])

    def pick(self, x: jax.Array, tokens: jax.Array) -> jax.Array:
        """x [own tokens, features] at the step's `tokens` int32 [n]: [n, features] on all ranks."""
        rows, rank = self.layout.key.decode_tokens, lax.axis_index(SEQ)
        of_prefill = jnp.maximum(tokens - rows, 0)
        owner = jnp.where(tokens < rows, 0, self.sharded.rank(of_prefill))
        place = jnp.where(tokens < rows, tokens, rows + self.sharded.before(owner, of_prefill))
        return lax.psum(jnp.where((owner == rank)[:, None], x[place], 0), SEQ)


def attend(
    layout: StepLayout,
    slot_mapping: SlotMapping,
    pages: Pages,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, Pages]:
    """Write k and v, then attend, for this rank's q, k, v [own tokens, heads, head_dim].

    Returns out [own tokens, query_heads, value_dim] and the pages.
    """
    tokens, rows = ShardedTokens(layout), layout.key.decode_tokens
    page_size, rank = pages.k.shape[3], lax.axis_index(SEQ)
    mine = slot_mapping.offsets // page_size == rank
    page_ids = jnp.where(mine, slot_mapping.page_ids, -1)
    offsets = slot_mapping.offsets % page_size
    if layout.key.ring:
        all_k, all_v = jnp.split(tokens.whole(jnp.concatenate([k, v], axis=1)), 2, axis=1)
        pages = write_kv(pages, all_k, all_v, page_ids, offsets)
        merged = _ring(layout, slot_mapping, pages, q, scale, window, soft_cap)
        return _with_sinks(merged, sinks).astype(q.dtype), pages
    own = [q, k] if isinstance(pages, LatentPages) else [q, k, v]
    splits = [*itertools.accumulate(x.shape[1] for x in own[:-1])]
    all_q, *new = jnp.split(tokens.whole(jnp.concatenate(own, axis=1)), splits, axis=1)
    all_k, all_v = new if len(new) > 1 else (*new, None)
    pages = write_kv(pages, all_k, all_v, page_ids, offsets)
    out, lse = kvp_partial(
        all_q,
        pages,
        slot_mapping.batch,
        axis_name=SEQ,
        num_decodes=rows,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )
    parts = []
    if rows:
        parts.append(merge_over(SEQ, out[:rows], lse[:rows]))
    if tokens.share:
        parts.append(merge_scattered(SEQ, out[rows:], lse[rows:]))
    return _with_sinks(_concatenated(parts), sinks).astype(q.dtype), pages


def _ring(layout, slot_mapping, pages, q, scale, window, soft_cap):
    """Out and lse of decodes, by merged partial attention, and of the one chunk, by ring
    attention."""
    rows, batch, sharded = (
        layout.key.decode_tokens,
        slot_mapping.batch,
        ShardedTokens(layout).sharded,
    )
    decodes = jax.tree.map(lambda array: array[:rows], batch)
    parts = []
    if rows:
        partial = kvp_partial(
            q[:rows],
            pages,
            decodes,
            axis_name=SEQ,
            num_decodes=rows,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
        )
        parts.append(merge_over(SEQ, *partial))
    chunk = slice(rows, rows + 1)
    out, lse = ring_paged_attention(
        q[None, rows:],
        pages,
        batch.tables[chunk, : layout.ring_pages],
        batch.context[chunk],
        batch.lengths[chunk],
        sharded,
        axis_name=SEQ,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        scheme=layout.ring_scheme,
    )
    return _concatenated([*parts, (out[0], lse[0])])


def _concatenated(parts):
    """Out and lse of the tokens of all parts."""
    return tuple(map(jnp.concatenate, zip(*parts)))


def _with_sinks(merged, sinks):
    """Out of merged attention, each head with its sink if there are any."""
    out, lse = merged
    if sinks is None:
        return out
    return merge_sinks(out, lse, sinks.astype(jnp.float32))[0]
