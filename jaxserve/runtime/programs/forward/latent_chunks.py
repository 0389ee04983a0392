"""Attention over latents, of which a prefill chunk's tokens attend to each other by keys and values
of heads.

A decode attends to latents: the keys and values of its context are nowhere, and to make them it
would multiply every latent. A chunk makes those of its own tokens, which are used by all that come
after them in the chunk, and the context before it stays latent. Attention is an algebra of partial
results, so both merge by their log-sum-exps, once the former are results over values of heads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.core.model_config import MLAConfig
from jaxserve.models.mla import OfHeads
from jaxserve.runtime.programs.layout.step_inputs import SlotMapping
from jaxserve.runtime.programs.layout.step_layout import StepLayout
from pallas_kernels.merge import merge_two
from pallas_kernels.paged_attention import (
    Pages,
    attend_within_chunks,
    before_chunks,
    paged_attention,
    write_kv,
)
from pallas_kernels.paged_attention import attend as attend_to_pages


def uncompressed_from(mla: MLAConfig | None, layout: StepLayout) -> int | None:
    """Prefill tokens from which on a program's layers attend by `attend`; None for never.

    With `batch_invariant` no sum may depend on where chunks begin. A rank of `seq` has some of a
    chunk's tokens, and of trees attention has parts already.
    """
    if mla is None or layout.tile or layout.seq > 1 or layout.tree_depth:
        return None
    return mla.uncompressed_from


def attend(
    slot_mapping: SlotMapping,
    pages: Pages,
    q: jax.Array,
    k: jax.Array,
    of_heads: OfHeads,
    *,
    num_decodes: int,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[jax.Array, Pages]:
    """As `mla.UncompressedAttention`, of which the first `num_decodes` rows are decodes; and the
    pages with the latents k written."""
    pages = write_kv(pages, k, None, slot_mapping.page_ids, slot_mapping.offsets)
    scores = {"scale": scale, "soft_cap": soft_cap}
    parts = []
    if num_decodes:
        decodes = jax.tree.map(lambda array: array[:num_decodes], slot_mapping.batch)
        groups = slot_mapping.decode_groups if window is None else None
        out, _ = paged_attention(
            q[:num_decodes],
            pages,
            decodes,
            num_decodes=num_decodes,
            window=window,
            groups=groups,
            **scores,
        )
        parts.append(of_heads.values(out))
    chunks = slot_mapping.batch.after_decodes(num_decodes)
    q = q[num_decodes:]
    visible = before_chunks(chunks, len(q), window)
    out, lse = attend_to_pages(q, pages, chunks, visible, num_decodes=0, **scores)
    new = of_heads.new(slice(num_decodes, None))
    own = attend_within_chunks(*new, chunks, window=window, **scores)
    before = of_heads.values(out.astype(q.dtype), dtype=jnp.float32)
    parts.append(merge_two(before, lse, *own)[0].astype(q.dtype))
    return jnp.concatenate(parts), pages
