"""A layer that follows the target's hidden states drafts (models/drafters/feature_layer.py): EAGLE,
EAGLE-3, and the layer of a model that predicts further tokens.

Its entry at position p is of the hidden state of the token there and the embedding of the token
after it, and gives the hidden state at p + 1, as it expects it. After every step it computes the
tokens of the step, from what the target has computed of them: of a sequence that decodes, the last
result gives its next draft. Later drafts follow from the layer's own results, whose entries the
next step overwrites. A page's last entry is of a token of the next page: found again by a prompt
that continues otherwise, it is of another token, and the first drafts are a little worse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.core.errors import ConfigError
from jaxserve.core.model_config import ModelConfig
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.core.steps.plan import ScheduledChunk
from jaxserve.kv.layout import KVPlace
from jaxserve.models.family import Params
from jaxserve.runtime.hardware.arrays import placed
from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.device_step import PackedInputs
from jaxserve.runtime.programs.forward.context_parallel import ShardedTokens
from jaxserve.runtime.programs.forward.forward_programs import BY_RANK, Hidden
from jaxserve.runtime.programs.layout.step_layout import StepLayout
from jaxserve.runtime.programs.page_programs import SetTables
from jaxserve.runtime.programs.program_kind import ProgramKind
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from jaxserve.runtime.proposers.draft_layer import DraftLayer
from jaxserve.runtime.proposers.draft_model import check_context, within
from jaxserve.runtime.proposers.drafter import (
    Draft,
    Drafter,
    sample_drafts,
)
from jaxserve.runtime.proposers.eagle_tree import TreeShape, draft_tree
from jaxserve.runtime.proposers.proposer import Proposer
from jaxserve.sampling import SamplingState
from jaxserve.sampling.processors import Processors
from jaxserve.sampling.rows import PLACE, POSITION
from jaxserve.sampling.speculation import NO_DRAFT, SpeculationState
from pallas_kernels.paged_attention import Pages

_SAMPLED = -1
"""In the place of the token after a chunk, where the step samples it."""


def draft(
    layer: DraftLayer,
    layout: StepLayout,
    processors: Processors,
    params: Params,
    outside: Params,
    kv: list[Pages],
    tables: jax.Array,
    speculation: SpeculationState,
    sampling: SamplingState,
    vector: jax.Array,
    rows: jax.Array,
    num_drafts: jax.Array,
) -> tuple[list[Pages], jax.Array, SpeculationState]:
    """As `drafter.draft`. The first draft is of the hidden state that `extend` left: each of the
    others takes a pass of the layer, and the last one none after it."""
    decodes = layout.unpack_decodes(tables, vector)
    lengths = speculation.lengths[decodes.slots]
    rows = rows.at[:, POSITION].add(lengths)
    layout = dataclasses.replace(layout, key=layout.key._replace(width=1))

    def sampled(place: jax.Array | int, hidden: jax.Array, drafts: jax.Array) -> jax.Array:
        logits = layer.logits(params, outside, hidden)
        own = rows.at[:, POSITION].add(place).at[:, PLACE].set(place)
        drafted = sample_drafts(logits, sampling, own, processors, drafts)[:, None]
        return lax.dynamic_update_slice_in_dim(drafts, drafted, place, axis=1)

    def following(place: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        kv, hidden, drafts = carry
        last = lax.dynamic_index_in_dim(drafts, place - 1, axis=1, keepdims=False)
        inputs = layout.decodes_at(decodes, lengths + place - 2)
        kv, hidden = layer(
            layout,
            params,
            outside,
            kv,
            jnp.maximum(last, 0),
            hidden,
            inputs.positions,
            inputs.real,
            inputs.slot_mappings,
        )
        return kv, hidden, sampled(place, hidden, drafts)

    hidden = speculation.hidden[decodes.slots]
    drafts = jnp.full((len(rows), speculation.drafts.shape[1]), NO_DRAFT)
    carry = kv, hidden, sampled(0, hidden, drafts)
    kv, _, drafts = lax.fori_loop(1, num_drafts, following, carry)
    state = speculation._replace(drafts=speculation.drafts.at[decodes.slots].set(drafts))
    return kv, decodes.tables, state


def extend(
    layer: DraftLayer,
    layout: StepLayout,
    tree_width: int,
    params: Params,
    outside: Params,
    kv: list[Pages],
    tables: jax.Array,
    last_tokens: jax.Array,
    speculation: SpeculationState,
    hidden: Hidden,
    vector: jax.Array,
    chunks: jax.Array,
) -> tuple[list[Pages], SpeculationState]:
    """The layer's entries of all tokens of the step packed in `vector`, whose drafts are verified.

    `hidden` is what the step returned; `chunks` int32 [chunks, 2] are the slot of each prefill
    chunk, and the token after it or _SAMPLED. Returns the pages, and the state with what the layer
    expects after each sequence's newest token.
    """
    before = speculation._replace(lengths=speculation.lengths - speculation.gained)
    _, inputs = layout.unpack(tables, vector, before)
    slots, count = inputs.slots, layout.key.decode_tokens
    places = before.lengths[slots][:, None] + jnp.arange(layout.key.width)
    after_decodes = jnp.take_along_axis(speculation.history[slots], places, axis=1)

    batch, (of_chunks, following) = inputs.slot_mappings[0].batch, chunks.T
    ends = (batch.starts + batch.lengths - 1)[count:]
    real = batch.lengths[count:] > 0
    following = jnp.where(following == _SAMPLED, last_tokens[of_chunks], following)
    after_prefills = jnp.roll(inputs.prefill_ids, -1)
    at_ends = jnp.where(real, ends - count, len(after_prefills))
    after_prefills = after_prefills.at[at_ends].set(following, mode="drop")

    token_ids = jnp.concatenate([jnp.maximum(after_decodes, 0).reshape(-1), after_prefills])
    of_tokens = token_ids, inputs.positions, inputs.real
    if layout.seq > 1:
        of_tokens = map(ShardedTokens(layout).own, of_tokens)
    token_ids, positions, real = of_tokens
    computed = len(slots) * (tree_width or layout.key.width)
    if hidden.kept:
        states = jnp.concatenate(hidden.kept, axis=-1)
        states, of_prefills = states[:computed], states[computed:]
    else:
        states, of_prefills = hidden.sampled[:computed], hidden.of_prefills
    of_prefills = of_prefills[: layout.key.prefill_tokens // layout.seq]
    if tree_width:
        nodes = jnp.arange(len(slots))[:, None] * tree_width + speculation.path[slots]
        states = states[nodes.reshape(-1)]
    features = layer.feature_layer.features(params, jnp.concatenate([states, of_prefills]))
    mappings = inputs.slot_mappings
    kv, x = layer(layout, params, outside, kv, token_ids, features, positions, real, mappings)

    newest = jnp.arange(len(slots)) * layout.key.width + speculation.gained[slots] - 1
    newest = jnp.maximum(jnp.concatenate([newest, ends]), 0)
    expected = x[newest] if layout.seq == 1 else ShardedTokens(layout).pick(x, newest)
    written = jnp.concatenate([slots, of_chunks])
    state = speculation._replace(hidden=speculation.hidden.at[written].set(expected))
    return kv, state


class _Draft(Draft):
    pure = draft
    reads = ("draft_params", "outside_layers", "kv", "tables", "speculation", "sampling")

    def __init__(self, shapes: ProgramShapes, layer: DraftLayer, set_tables: SetTables) -> None:
        super().__init__(shapes, layer.drafter, set_tables)
        self._layer = layer

    def static(self, key: int) -> tuple[Any, ...]:
        return self._layer, self.layout(key), self.shapes.processors


class _DraftTree(_Draft):
    """A tree of drafts for each decode."""

    title = "eagle-draft-tree"
    pure = draft_tree
    replaces = ("tables", "speculation")

    def static(self, key: int) -> tuple[Any, ...]:
        speculative = self.shapes.config.speculative_config
        size = speculative.num_speculative_tokens
        shape = TreeShape(speculative.top_k, speculative.tree_depth, size)
        return *super().static(key), shape

    def uploads(self, key: int) -> tuple[Any, ...]:
        return super().uploads(key)[:2]

    def __call__(self, state: DeviceState, step: PackedInputs) -> None:
        self.run(state, *self.packed_decodes(state, step))


class Extend(ProgramKind[ProgramKey]):
    """Keeps the layer up with the target."""

    title = "eagle-extend"
    pure = extend
    reads = ("draft_params", "outside_layers", "kv", "tables", "last_tokens", "speculation")
    replaces = ("kv", "speculation")

    def __init__(self, shapes: ProgramShapes, layer: DraftLayer) -> None:
        super().__init__(shapes)
        self._layer = layer

    def keys(self) -> Iterable[ProgramKey]:
        return self.shapes.layouts

    def layout(self, key: ProgramKey) -> StepLayout:
        layout = self.shapes.layouts[key]
        if layout.tree_depth:
            key = key._replace(width=1 + layout.tree_depth)
        # As for drafts, rounding is of no consequence.
        return dataclasses.replace(layout, key=key, tree_depth=0, tile=None)

    def static(self, key: ProgramKey) -> tuple[Any, ...]:
        tree_width = key.width if self.shapes.layouts[key].tree_depth else 0
        return self._layer, self.layout(key), tree_width

    def uploads(self, key: ProgramKey) -> tuple[Any, ...]:
        shapes, layout = self.shapes, self.layout(key)
        of_prefills = shapes.prefill_hidden(key)
        kept = [self._kept(key)] * len(shapes.aux_layers)
        vectors = shapes.int32(layout.size), shapes.int32(layout.chunks, 2)
        return Hidden(shapes.sampled_hidden, of_prefills, kept), *vectors

    def _kept(self, key: ProgramKey) -> jax.ShapeDtypeStruct:
        """The shape of a step's activations between programs, those of all ranks."""
        shapes, own = self.shapes, self.shapes.layouts[key].num_tokens
        own = (key.decode_tokens * shapes.seq + key.prefill_tokens) if shapes.seq > 1 else own
        array = jax.ShapeDtypeStruct((own, shapes.model.hidden_size), shapes.dtype)
        return placed(array, shapes.arrays.sharding(*BY_RANK))

    def __call__(
        self,
        state: DeviceState,
        step: PackedInputs,
        key: ProgramKey,
        hidden: Hidden,
    ) -> None:
        layout = self.layout(key)
        chunks = np.full((layout.chunks, 2), (self.shapes.trash_slot, 0), np.int32)
        for row, chunk in enumerate(step.plan.prefills):
            chunks[row] = chunk.slot, _token_after(chunk)
        self.run(state, key, hidden, layout.pack(step.frozen), chunks)


def _token_after(chunk: ScheduledChunk) -> int:
    if chunk.samples:
        return _SAMPLED
    (token,) = chunk.seq.token_ids(chunk.stop, chunk.stop + 1)
    return token


class EagleProposer(Proposer):
    """A layer with parameters and pages of its own, and what it shares with the target."""

    def __init__(self, shapes: ProgramShapes, set_tables: SetTables) -> None:
        draft = shapes.draft_model
        config = within(shapes.local_draft_model, shapes.kv_layout.groups[0])
        places = (KVPlace(0, shapes.kv_layout.layers_per_page),)
        drafter = Drafter(draft.family, config, places, num_recent=1)
        layer = DraftLayer(drafter, draft.feature_layer, shapes.family, shapes.local_model)
        self._draft = (_DraftTree if shapes.tree_depth else _Draft)(shapes, layer, set_tables)
        self._extend = Extend(shapes, layer)
        self.kinds = (self._draft, self._extend)

    def propose(self, state: DeviceState, step: PackedInputs) -> None:
        if step.plan.width > 1:
            self._draft(state, step)

    def extend(
        self,
        state: DeviceState,
        step: PackedInputs,
        key: ProgramKey,
        hidden: Hidden,
    ) -> None:
        self._extend(state, step, key, hidden)


def check_draft_layer(layer: ModelConfig, target: ModelConfig, max_model_len: int) -> None:
    """Raises ConfigError for a layer that does not fit the target, or its context."""
    for name in ("hidden_size", "vocab_size"):
        theirs, ours = getattr(layer, name), getattr(target, name)
        if theirs != ours:
            raise ConfigError(
                f"the draft layer of speculative_config has a {name} of {theirs}, and the model "
                f"of {ours}; train one for this model."
            )
    check_context(layer, max_model_len)
