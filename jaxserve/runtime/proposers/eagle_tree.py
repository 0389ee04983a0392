"""A draft layer makes a tree of guesses, wide where it is unsure and deep where it is sure
(EAGLE-2; Li et al. 2024, 2406.16858).

Depth by depth the layer runs over the most confident guesses of the last one, and guesses what
follows each; a guess is as confident as all on the way to it are together. Of all guesses those
with the most confidence are the drafts, which always include those on the way to them.

The layer's entries of these guesses are in no pages: they attend to the committed ones there and to
each other. After the step `eagle.extend` writes those of the tokens that were accepted.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.models.family import Params
from jaxserve.runtime.programs.layout.step_inputs import StepInputs
from jaxserve.runtime.programs.layout.step_layout import StepLayout
from jaxserve.runtime.proposers.draft_layer import DraftLayer
from jaxserve.runtime.proposers.drafter import best_drafts
from jaxserve.sampling import SamplingState
from jaxserve.sampling.processors import Processors
from jaxserve.sampling.rows import POSITION
from jaxserve.sampling.speculation import NO_DRAFT, SpeculationState
from pallas_kernels.merge import merge_two
from pallas_kernels.paged_attention import Pages, Visible, attend, attend_densely


@dataclasses.dataclass(frozen=True)
class TreeShape:
    """How a tree grows: `top_k` guesses after each of the `top_k` best of a depth, up to `depth`;
    the best `size` of all of them are drafts."""

    top_k: int
    depth: int
    size: int


class _Best(NamedTuple):
    """The most confident guesses of a depth, [rows, top_k, ...]: their tokens, how confident they
    are, their places among all guesses, the hidden states that they were made from, and which of
    the entries are on the way to them, bool [..., entries]."""

    tokens: jax.Array
    logs: jax.Array
    places: jax.Array
    hidden: jax.Array
    on_way: jax.Array


class _Guesses(NamedTuple):
    """All guesses, depth after depth [rows, guesses]: tokens, confidence, and the place of the
    guess that each follows, -1 for the newest token."""

    tokens: jax.Array
    logs: jax.Array
    parents: jax.Array

    def with_more(self, first: jax.Array, *more: jax.Array) -> _Guesses:
        put = lax.dynamic_update_slice_in_dim
        return _Guesses(*(put(old, new, first, 1) for old, new in zip(self, more)))


def draft_tree(
    layer: DraftLayer,
    layout: StepLayout,
    processors: Processors,
    shape: TreeShape,
    params: Params,
    outside: Params,
    kv: list[Pages],
    tables: jax.Array,
    speculation: SpeculationState,
    sampling: SamplingState,
    vector: jax.Array,
    rows: jax.Array,
) -> tuple[jax.Array, SpeculationState]:
    """A tree of drafts for each decode of a step packed in `vector`, of the hidden state that
    `eagle.extend` left. Arguments as of `eagle.draft`; returns the page tables with the changes of
    `vector`, and the state with the drafts and which of them each follows."""
    decodes = layout.unpack_decodes(tables, vector)
    lengths = speculation.lengths[decodes.slots]
    rows = rows.at[:, POSITION].add(lengths)
    layout = dataclasses.replace(layout, key=layout.key._replace(width=1))
    inputs = layout.decodes_at(decodes, lengths - 1)
    count, top_k = len(lengths), shape.top_k
    entries = top_k * (shape.depth - 1)

    def guesses_after(hidden: jax.Array, depth: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """Tokens and logarithms [rows, n * top_k], after states [rows, n, hidden] of a depth."""
        own = jnp.repeat(rows.at[:, POSITION].add(depth), hidden.shape[1], axis=0)
        logits = layer.logits(params, outside, hidden.reshape(-1, hidden.shape[2]))
        tokens, logs = best_drafts(logits, sampling, own, processors, top_k)
        return tokens.reshape(count, -1), logs.reshape(count, -1)

    hidden = speculation.hidden[decodes.slots][:, None]
    tokens, logs = guesses_after(hidden, 0)
    most = top_k + (shape.depth - 1) * top_k * top_k
    nothing = jnp.full((count, most), -1)
    everything = _Guesses(nothing, jnp.full((count, most), -jnp.inf), nothing)
    everything = everything.with_more(0, tokens, logs, nothing[:, :top_k])
    best = _Best(
        tokens,
        logs,
        jnp.broadcast_to(jnp.arange(top_k), (count, top_k)),
        jnp.repeat(hidden, top_k, axis=1),
        jnp.zeros((count, top_k, entries), bool),
    )
    config = layer.drafter.config
    dtype = hidden.dtype
    empty = jnp.zeros((2, count, entries, config.num_kv_heads, config.head_dim), dtype)

    def deeper(depth: jax.Array, carry: tuple[_Guesses, _Best, jax.Array]) -> tuple[Any, ...]:
        """Runs the layer over the best guesses of `depth`, from 1 on."""
        everything, best, kept = carry
        first = (depth - 1) * top_k
        own = jnp.arange(entries) == first + jnp.arange(top_k)[:, None]
        on_way = best.on_way | own
        hidden, kept = _run(
            layer, params, outside, kv, inputs, lengths + depth - 2, best, on_way, first, kept
        )
        tokens, logs = guesses_after(hidden, depth)
        logs += jnp.repeat(best.logs, top_k, axis=1)
        start = top_k + first * top_k
        parents = jnp.repeat(best.places, top_k, axis=1)
        everything = everything.with_more(start, tokens, logs, parents)
        top_logs, places = lax.top_k(logs, top_k)
        after = places // top_k
        best = _Best(
            jnp.take_along_axis(tokens, places, axis=1),
            top_logs,
            start + places,
            jnp.take_along_axis(hidden, after[:, :, None], axis=1),
            jnp.take_along_axis(on_way, after[:, :, None], axis=1),
        )
        return everything, best, kept

    if entries:
        everything, *_ = lax.fori_loop(1, shape.depth, deeper, (everything, best, empty))
    drafts, parents = _most_confident(everything, shape.size)
    room = lengths[:, None] + jnp.arange(shape.size) < decodes.stops[:, None]
    slots = decodes.slots
    state = speculation._replace(
        drafts=speculation.drafts.at[slots].set(jnp.where(room, drafts, NO_DRAFT)),
        parents=speculation.parents.at[slots].set(parents),
    )
    return decodes.tables, state


def _run(
    layer: DraftLayer,
    params: Params,
    outside: Params,
    kv: list[Pages],
    inputs: StepInputs,
    positions: jax.Array,
    best: _Best,
    on_way: jax.Array,
    first: jax.Array,
    kept: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The hidden states after `best` [rows, top_k, hidden], whose entries are at `positions` int32
    [rows]; and `kept`, the keys and values of all entries [2, rows, entries, heads, dim], with
    theirs from `first` on."""
    count, top_k = best.tokens.shape
    config = layer.drafter.config
    where = jnp.repeat(positions, top_k)
    token_ids = jnp.maximum(best.tokens, 0).reshape(-1)
    hidden = best.hidden.reshape(-1, best.hidden.shape[2])
    x, shared = layer.enter(params, outside, token_ids, hidden, where)
    (place,), (kind,) = layer.drafter.places, config.layer_kinds
    batch = inputs.slot_mappings[place.group].batch
    batch = jax.tree.map(lambda array: jnp.repeat(array, top_k, axis=0), batch)
    until = jnp.maximum(batch.context - 1, 0)

    def attention(q, k, v, *, window, sinks=None):
        nonlocal kept
        new = jnp.stack([k, v]).reshape(2, count, top_k, *k.shape[1:]).astype(kept.dtype)
        kept = lax.dynamic_update_slice_in_dim(kept, new, first, axis=2)
        since = jnp.zeros_like(until) if window is None else jnp.maximum(where + 1 - window, 0)
        committed = Visible(jnp.minimum(since, until), until)
        options = {"scale": config.attention_scale, "soft_cap": config.attention_soft_cap}
        pages = kv[place.array]
        context = attend(q, pages, batch, committed, num_decodes=len(q), **options)
        out, lse = attend_densely(
            q.reshape(count, top_k, *q.shape[1:]), *kept.astype(q.dtype), on_way, **options
        )
        out, lse = (array.reshape(len(q), *array.shape[2:]) for array in (out, lse))
        return merge_two(*context, out, lse)[0].astype(q.dtype)

    x = layer.drafter.family.layer(params["layers"][0], config, kind, x, shared, attention)
    return layer.expected(params, x, hidden.dtype).reshape(count, top_k, -1), kept


def _most_confident(everything: _Guesses, size: int) -> tuple[jax.Array, jax.Array]:
    """The `size` best guesses int32 [rows, size] by depth, and for each the node that it follows.

    None is more confident than the one that it follows, and of equals the first comes first.
    """
    logs, chosen = lax.top_k(everything.logs, size)
    order = jnp.argsort(chosen, axis=1)
    chosen, logs = (jnp.take_along_axis(array, order, axis=1) for array in (chosen, logs))
    tokens, parents_of = (
        jnp.take_along_axis(array, chosen, axis=1)
        for array in (everything.tokens, everything.parents)
    )
    real = logs > -jnp.inf
    same = parents_of[:, :, None] == chosen[:, None]
    parents = jnp.where(real & (parents_of >= 0), 1 + jnp.argmax(same, axis=2), 0)
    return jnp.where(real, tokens, NO_DRAFT), parents
