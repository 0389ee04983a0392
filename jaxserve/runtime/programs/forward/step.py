"""The pure functions that run the model over one packed step.

Their shapes are fixed by a StepLayout, and the buffers they replace (KV pages, page tables) are
donated. The model is one program, `forward`, or three kinds of programs, `embed`, `layers` and
`final_norm`; one `layers` program serves every group of equal layers
(docs/decisions/002-programs.md). pipeline_step.py has those of a pipeline.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.core.model_config import LayerKind, ModelConfig
from jaxserve.kv.layout import KVPlace
from jaxserve.models import lora, mla, moe, parallel
from jaxserve.models.family import Family, Params
from jaxserve.models.layers import Residual, pending_sums, settled
from jaxserve.models.mla import OfHeads
from jaxserve.runtime.programs.forward import context_parallel, latent_chunks
from jaxserve.runtime.programs.forward.context_parallel import ShardedTokens
from jaxserve.runtime.programs.forward.dual_batch import halves, rows_of_half
from jaxserve.runtime.programs.layout.step_inputs import SlotMapping
from jaxserve.runtime.programs.layout.step_layout import StepLayout
from jaxserve.runtime.programs.layout.tiles import batch_of_tile, num_real_tokens, scan_tiles
from jaxserve.sampling.speculation import SpeculationState
from pallas_kernels.paged_attention import Pages, paged_attention, tree_attention, write_kv


class TokenInputs(NamedTuple):
    """What all layers read of a step's tokens, arrays [tokens, ...]: what the family shares among
    them, the slots of adapters, None for a model without, with KV on the host the position from
    which on theirs is in the pool, and for a mixture of experts which belong to a sequence."""

    of_family: Any
    adapters: jax.Array | None = None
    since: jax.Array | None = None
    real: jax.Array | None = None


def forward(
    family: Family,
    config: ModelConfig,
    layout: StepLayout,
    params: Params,
    kv: list[Pages],
    tables: jax.Array,
    last_tokens: jax.Array,
    speculation: SpeculationState | None,
    metadata: jax.Array,
    *,
    keep: Sequence[int] = (),
) -> tuple[list[Pages], jax.Array, jax.Array, jax.Array, list[jax.Array], jax.Array | None]:
    """Run the whole model over one packed step.

    `kv` holds the Pages of each layer of a group, `tables` int32 [groups * (slots + 1), max_pages]
    the page tables of every slot, `last_tokens` [slots + 1] int32 the newest token of every slot;
    `speculation` has their drafts and lengths, None without speculation. Returns the pages with the
    step's keys and values written, the updated tables, the hidden states to sample from
    [sample_width, hidden], as `normed` those of the prefill tokens, and as `layers` what entered
    the layers `keep` and the tokens of each expert.
    """
    tables, x, shared, slot_mappings, sampled = embed(
        family, config, layout, params, tables, last_tokens, speculation, metadata
    )
    kinds, places, own = config.layer_kinds, layout.kv.places, params["layers"]
    kv, x, kept, loads = layers(
        family, config, layout, kinds, places, own, kv, x, shared, slot_mappings, keep=keep
    )
    return kv, tables, *final_norm(family, config, layout, params, x, sampled), kept, loads


def embed(
    family: Family,
    config: ModelConfig,
    layout: StepLayout,
    params: Params,
    tables: jax.Array,
    last_tokens: jax.Array,
    speculation: SpeculationState | None,
    metadata: jax.Array,
) -> tuple[jax.Array, jax.Array, TokenInputs, tuple[SlotMapping, ...], jax.Array]:
    """First part of `forward`: page tables, embeddings, inputs shared by all layers, slot mapping
    of each KV group, indices of the sampled tokens."""
    tables, step = layout.unpack(tables, metadata, speculation)
    decode_ids = last_tokens[step.slots, None]
    if speculation is not None:
        drafts = speculation.drafts[step.slots, : layout.key.width - 1]
        decode_ids = jnp.concatenate([decode_ids, jnp.maximum(drafts, 0)], axis=1)
    token_ids = jnp.concatenate([decode_ids.reshape(-1), step.prefill_ids])
    token_ids = jnp.pad(token_ids, (0, layout.num_tokens - len(token_ids)))
    of_tokens = token_ids, step.positions, step.adapters, step.real if config.moe else None
    if layout.seq > 1:
        of_tokens = jax.tree.map(ShardedTokens(layout).own, of_tokens)
    token_ids, positions, adapters, real = of_tokens

    def embed(carry, tokens):
        return carry, family.embed(params, config, *tokens)

    count = num_real_tokens(step.slot_mappings[0].batch)
    _, (x, shared) = scan_tiles(embed, (), (token_ids, positions), layout.tile, count)
    inputs = TokenInputs(shared, adapters, step.since, real)
    return tables, x, inputs, step.slot_mappings, step.sampled


def layers(
    family: Family,
    config: ModelConfig,
    layout: StepLayout,
    kinds: Sequence[LayerKind],
    places: Sequence[KVPlace],
    params: Sequence[Params],
    kv: Sequence[Pages],
    x: jax.Array,
    shared: TokenInputs,
    slot_mappings: Sequence[SlotMapping],
    *,
    apart: bool = False,
    keep: Sequence[int] = (),
) -> tuple[list[Pages], jax.Array, list[jax.Array], jax.Array | None]:
    """Middle part of `forward`: consecutive layers with these kinds and parameters, whose pages are
    at these places of `kv`. Parameters with the key "lora" have adapters. `apart`: between
    layers round as between programs, so that tokens do not depend on which layers share one.

    Returns `kv` with the new keys and values, the activations after the last layer, those that
    entered the layers `keep`, indices into these, and how many tokens took each expert, int32
    [sparse layers, experts]: None without such layers, or where `shared` does not say which are
    real.
    """
    kv = list(kv)
    count, tokens = num_real_tokens(slot_mappings[0].batch), jnp.arange(layout.num_tokens)
    parts = halves(layout.num_tokens) if layout.in_halves else (slice(None),)

    @functools.cache
    def layer_of(kind: LayerKind, index: int) -> Callable[..., tuple[Any, jax.Array]]:
        """A layer over one of `parts`, which is traced once for all equal layers."""
        part = parts[index]

        def compute(p, pages, x, shared, slot_mapping, tokens, count):
            def of_tile(carry, arrays):
                pages, load = carry
                x, shared, page_ids, offsets, tokens, trees = arrays
                batch, num_decodes = slot_mapping.batch, layout.key.decode_tokens
                if layout.tile is not None:
                    batch, num_decodes = batch_of_tile(batch, tokens[0], layout.tile), 0
                elif layout.in_halves:
                    batch, num_decodes = rows_of_half(batch, part, num_decodes)
                own = slot_mapping._replace(page_ids=page_ids, offsets=offsets, batch=batch)
                if layout.tile is not None:
                    own = own._replace(trees=trees)
                with pending_sums(layout.tile is None and not apart):
                    pages, x, counts = _layer(
                        family, config, layout, kind, p, own, num_decodes, pages, x, shared
                    )
                carry = pages, jax.tree.map(jnp.add, load, counts)
                return carry, _in_its_dtype(x) if apart else x

            trees = slot_mapping.trees if layout.tile is not None else None
            of_tokens = (shared, slot_mapping.page_ids, slot_mapping.offsets, tokens, trees)
            arrays = (x, *_part(of_tokens, part))
            counted = kind.sparse and shared.real is not None
            load = jnp.zeros(config.moe.num_experts, jnp.int32) if counted else None
            return scan_tiles(of_tile, (pages, load), arrays, layout.tile, count)

        return jax.jit(compute)

    x = parallel.enter_layers(x)
    xs = [_part(x, part) for part in parts]
    kept, loads = [], []
    for number, (kind, place, p) in enumerate(zip(kinds, places, params, strict=True)):
        if number in keep:
            kept.append(_together(xs))
        slot_mapping = slot_mappings[place.group]
        of_parts = []
        for index in range(len(parts)):
            (kv[place.array], load), xs[index] = layer_of(kind, index)(
                p, kv[place.array], xs[index], shared, slot_mapping, tokens, count
            )
            of_parts.append(load)
        if of_parts[0] is not None:
            loads.append(sum(of_parts))
    return kv, _together(xs), kept, jnp.stack(loads) if loads else None


def _together(parts: Sequence[Residual]) -> jax.Array:
    """All tokens' activations, on every rank."""
    whole = [settled(part) for part in parts]
    return parallel.leave_layers(jnp.concatenate(whole) if len(whole) > 1 else whole[0])


def _part(arrays: Any, part: slice) -> Any:
    """These tokens of arrays [tokens, ...]."""
    return arrays if part == slice(None) else jax.tree.map(lambda array: array[part], arrays)


def _layer(
    family: Family,
    config: ModelConfig,
    layout: StepLayout,
    kind: LayerKind,
    p: Params,
    slot_mapping: SlotMapping,
    num_decodes: int,
    pages: Pages,
    x: jax.Array,
    shared: TokenInputs,
) -> tuple[Pages, jax.Array, jax.Array | None]:
    """One layer over tokens whose rows are those of `slot_mapping`, the first `num_decodes` of them
    decodes: the pages with their keys and values, the activations after it, and of a mixture the
    tokens of each expert."""

    scores = {"scale": config.attention_scale, "soft_cap": config.attention_soft_cap}

    def attention(q, k, v, *, window, sinks=None):
        if layout.seq == 1:
            attend = functools.partial(_attend, num_decodes=num_decodes)
        else:
            attend = functools.partial(context_parallel.attend, layout)
        attended = attend(slot_mapping, pages, q, k, v, window=window, sinks=sinks, **scores)
        return written(*attended)

    def uncompressed(q: jax.Array, k: jax.Array, of_heads: OfHeads, *, window: int | None):
        attended = latent_chunks.attend(
            slot_mapping, pages, q, k, of_heads, num_decodes=num_decodes, window=window, **scores
        )
        return written(*attended)

    def written(out, after):
        nonlocal pages
        if layout.in_halves:
            # The next half writes in place, to pages that this one has read.
            out, after = lax.optimization_barrier((out, after))
        pages = after
        return out

    least = latent_chunks.uncompressed_from(config.mla, layout)
    prefills = len(slot_mapping.page_ids) - num_decodes
    p = lora.adapted(p, p.get("lora"), shared.adapters)
    with (
        parallel.context_parallel(layout.key.decode_tokens),
        moe.real_tokens(shared.real) as counts,
        mla.uncompressed(uncompressed if least and prefills >= least else None),
    ):
        x = family.layer(p, config, kind, x, shared.of_family, attention)
    return pages, x, counts[0] if counts else None


def _in_its_dtype(x: jax.Array) -> jax.Array:
    """x without the digits beyond its dtype that XLA may keep within a program."""
    if x.dtype == jnp.float32:
        return x
    kept = jnp.finfo(x.dtype)
    return lax.reduce_precision(x.astype(jnp.float32), kept.nexp, kept.nmant).astype(x.dtype)


def _attend(
    slot_mapping: SlotMapping,
    pages: Pages,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    num_decodes: int,
) -> tuple[jax.Array, Pages]:
    """Write k and v to the pages, then attend, on a device that holds whole pages."""
    pages = write_kv(pages, k, v, slot_mapping.page_ids, slot_mapping.offsets)
    trees = slot_mapping.trees
    if trees is not None:
        out, _ = tree_attention(
            q,
            pages,
            slot_mapping.batch,
            trees.rows,
            trees.mask,
            positions=trees.positions,
            until=trees.until,
            paths=trees.paths,
            num_decodes=num_decodes,
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            sinks=sinks,
        )
        return out, pages
    out, _ = paged_attention(
        q,
        pages,
        slot_mapping.batch,
        num_decodes=num_decodes,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        groups=slot_mapping.decode_groups if window is None else None,
    )
    return out, pages


def final_norm(
    family: Family,
    config: ModelConfig,
    layout: StepLayout,
    params: Params,
    x: jax.Array,
    sampled: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Last part of `forward`: hidden states to sample from, and as `normed` of the prefill
    tokens."""
    picked, of_prefill = normed(family, config, layout, params, x, sampled)
    return for_sampling(layout, picked), of_prefill


def normed(
    family: Family,
    config: ModelConfig,
    layout: StepLayout,
    params: Params,
    x: jax.Array,
    sampled: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Normed hidden states at the places `sampled` [rows, hidden], and of this rank's prefill
    tokens, with room for those of the largest step [most tokens, hidden], so that what follows is
    the same program after all steps; none [0, hidden] of a step that only decodes."""

    def norm(carry, x):
        return carry, family.final_norm(params, config, x)

    _, hidden = scan_tiles(norm, (), x, layout.tile, len(x))
    picked = hidden[sampled] if layout.seq == 1 else ShardedTokens(layout).pick(hidden, sampled)
    own_prefill = layout.key.prefill_tokens // layout.seq
    first = layout.key.decode_tokens
    of_prefill = hidden[first : first + own_prefill]
    if own_prefill:
        room = layout.max_prefill_tokens // layout.seq
        of_prefill = jnp.pad(of_prefill, ((0, room - own_prefill), (0, 0)))
    return picked, of_prefill


def for_sampling(layout: StepLayout, picked: jax.Array) -> jax.Array:
    """Hidden states [tokens, hidden] padded to the one shape that sampling programs take."""
    return jnp.pad(picked, ((0, layout.sample_width - len(picked)), (0, 0)))
