"""A layer in parts, for sequences whose older pages are on the host.

Queries come from `enter_layer`. Attention is an algebra of partial results: over the pages in the
pool by `attend_in_pool`, over pages on the host by `attend_on_host`, or over groups of these by
`attend_group`, one after another, merged by their log-sum-exps. What follows the attention is
`leave_layer`. A family's layer is one function with the attention within; the first part has no use
for what comes after it, nor the last for what comes before, and the compiler drops both.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxserve.core.model_config import LayerKind, ModelConfig
from jaxserve.models import lora, moe
from jaxserve.models.family import Family, Params
from jaxserve.runtime.planning.sparf import SparFSizes
from jaxserve.runtime.programs.forward.step import TokenInputs
from jaxserve.runtime.programs.host_kv.sparf_step import attend_to_some
from jaxserve.runtime.programs.layout.step_inputs import SlotMapping
from jaxserve.runtime.programs.layout.step_layout import StepLayout
from pallas_kernels.merge import merge_sinks, merge_two
from pallas_kernels.page_copy import scatter_pages
from pallas_kernels.paged_attention import (
    PageLayout,
    Pages,
    RaggedBatch,
    Visible,
    attend,
    write_kv,
)
from pallas_kernels.paged_attention.masks import causal, owners
from sharding_rules import TENSOR

OF_HEADS = P(None, TENSOR)
"""Of each array of a Partial, and of queries: each device has its heads."""


class Partial(NamedTuple):
    """Attention of queries [tokens, heads, head_dim] over some of their context: out [tokens,
    heads, value_dim] and lse [tokens, heads], both float32, so that merging rounds no further."""

    q: jax.Array
    out: jax.Array
    lse: jax.Array


def enter_layer(
    family: Family,
    config: ModelConfig,
    kind: LayerKind,
    params: Params,
    pages: Pages,
    x: jax.Array,
    shared: TokenInputs,
    slot_mapping: SlotMapping,
) -> tuple[Pages, jax.Array]:
    """The layer up to its attention: writes the step's keys and values to `pages`; its queries
    [tokens, heads, head_dim]."""
    queries = None

    def attention(q, k, v, *, window, sinks=None):
        nonlocal pages, queries
        pages = write_kv(pages, k, v, slot_mapping.page_ids, slot_mapping.offsets)
        queries = q
        return q[..., : pages.value_dim]

    family.layer(_adapted(params, shared), config, kind, x, shared.of_family, attention)
    return pages, queries


def attend_in_pool(
    config: ModelConfig,
    layout: StepLayout,
    window: int | None,
    pages: Pages,
    q: jax.Array,
    batch: RaggedBatch,
    since: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Attention of queries to the tokens of their rows whose KV is in the pool: out and lse, as of
    a Partial. These are those of the window, or without one from `since` int32 [tokens] on."""
    first, until = causal(batch, len(q), layout.key.decode_tokens, window, None)
    since = jnp.minimum(since, until) if window is None else first
    out, lse = attend(
        q,
        pages,
        batch,
        Visible(since, until),
        num_decodes=layout.key.decode_tokens,
        scale=config.attention_scale,
        soft_cap=config.attention_soft_cap,
    )
    return out.astype(jnp.float32), lse


def attend_group(
    config: ModelConfig,
    layout: StepLayout,
    pages: PageLayout,
    partial: Partial,
    batch: RaggedBatch,
    staged: jax.Array,
    tables: jax.Array,
) -> Partial:
    """Merges attention over a group of host pages into `partial`.

    staged [group pages, elements]: the group; tables int32 [rows, group pages + 1]: which of these
    each row has, in order, and how many. All of their tokens come before the step's.
    """
    empty = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), pages.shapes)
    ids = 1 + jnp.arange(len(staged))  # No row reads page 0.
    (group,) = scatter_pages([empty], ids, staged)
    row, _, owned = owners(batch, len(partial.q))
    until = jnp.where(owned, tables[row, -1] * layout.page_size, 0)
    out, lse = attend(
        partial.q,
        group,
        batch._replace(tables=1 + tables[:, :-1]),
        Visible(jnp.zeros_like(until), until),
        num_decodes=layout.key.decode_tokens,
        scale=config.attention_scale,
        soft_cap=config.attention_soft_cap,
    )
    return Partial(partial.q, *merge_two(partial.out, partial.lse, out, lse))


def attend_on_host(
    config: ModelConfig,
    layout: StepLayout,
    sparf: SparFSizes | None,
    q: jax.Array,
    pages: Pages,
    batch: RaggedBatch,
    means: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of queries to the first `batch.context` tokens of their rows, whose pages are those
    of the host: out and lse, both float32. All of these tokens come before the step's. With
    SparF, decodes attend to some of them; `means` are their mean values."""
    row, _, owned = owners(batch, len(q))
    until = jnp.where(owned, batch.context[row], 0)
    decodes = layout.key.decode_tokens
    if sparf is not None:
        until = jnp.where(jnp.arange(len(q)) < decodes, 0, until)
    out, lse = attend(
        q,
        pages,
        batch,
        Visible(jnp.zeros_like(until), until),
        num_decodes=decodes,
        scale=config.attention_scale,
        soft_cap=config.attention_soft_cap,
        backend="xla",  # Whatever the other programs run on.
    )
    if sparf is None or not decodes:
        return out, lse
    tables, context = batch.tables[:decodes], batch.context[:decodes]
    some = attend_to_some(config, sparf, q[:decodes], pages, tables, context, means)
    return out.at[:decodes].set(some[0]), lse.at[:decodes].set(some[1])


def merge_from_host(partial: Partial, out: jax.Array, lse: jax.Array) -> Partial:
    """Merges attention that the host has computed into `partial`."""
    return Partial(partial.q, *merge_two(partial.out, partial.lse, out, lse))


def leave_layer(
    family: Family,
    config: ModelConfig,
    kind: LayerKind,
    params: Params,
    x: jax.Array,
    shared: TokenInputs,
    partial: Partial,
) -> jax.Array:
    """The layer from its attention on."""

    def attention(q, k, v, *, window, sinks=None):
        out = partial.out
        if sinks is not None:
            out, _ = merge_sinks(out, partial.lse, sinks.astype(jnp.float32))
        return out.astype(q.dtype)

    params = _adapted(params, shared)
    with moe.real_tokens(shared.real):
        return family.layer(params, config, kind, x, shared.of_family, attention)


def _adapted(params: Params, shared: TokenInputs) -> Params:
    return lora.adapted(params, params.get("lora"), shared.adapters)
