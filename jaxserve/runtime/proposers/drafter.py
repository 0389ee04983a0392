"""Drafting by a model: token after token, on the device, in one program for a whole run of drafts.

The drafter samples with the parameters and the noise with which the target will sample at the same
position, so that both choose the same token as often as their distributions allow (Gumbel coupling;
sampling/noise.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.core.model_config import ModelConfig
from jaxserve.core.steps.plan import StepPlan
from jaxserve.kv.layout import KVPlace
from jaxserve.models.family import Family, Params
from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.device_step import PackedInputs
from jaxserve.runtime.programs.forward import step
from jaxserve.runtime.programs.layout.frozen_plan import FrozenPlan
from jaxserve.runtime.programs.layout.step_inputs import DecodeRows
from jaxserve.runtime.programs.layout.step_layout import StepLayout
from jaxserve.runtime.programs.page_programs import SetTables
from jaxserve.runtime.programs.program_kind import ProgramKind
from jaxserve.runtime.programs.shapes.program import ProgramShapes, holding
from jaxserve.sampling import SamplingState, candidates, distribution, most_likely, pack_rows
from jaxserve.sampling import general as sample_general
from jaxserve.sampling import greedy as sample_greedy
from jaxserve.sampling.processors import Processors
from jaxserve.sampling.rows import (
    FLAG_BAD_WORDS,
    FLAG_BIAS,
    FLAG_PENALTY,
    FLAG_PROCESSORS,
    FLAGS,
    MIN_TOKENS,
    NUM_FIELDS,
    PLACE,
    POSITION,
    TEMPERATURE,
)
from jaxserve.sampling.speculation import NO_DRAFT, SpeculationState
from jaxserve.structured.bitmask import mask_words
from pallas_kernels.paged_attention import Pages


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A model that drafts, as one device runs it, with the pages of its layers at `places`.

    `num_recent`: how many of a sequence's last tokens a pass computes. The newest is always without
    KV; the one before it too, where that was the last draft of a step and was accepted, unless the
    target computes the same KV.
    """

    family: Family
    config: ModelConfig
    places: tuple[KVPlace, ...]
    num_recent: int


_Carry = tuple[list[Pages], jax.Array, jax.Array, jax.Array | None]
"""Pages, recent tokens int32 [rows, num_recent] and drafts int32 [rows, most], and where they are
kept the distributions of these, float32 [rows, most, padded vocab]."""


def draft(
    drafter: Drafter,
    layout: StepLayout,
    processors: Processors,
    params: Params,
    kv: list[Pages],
    tables: jax.Array,
    speculation: SpeculationState,
    sampling: SamplingState,
    vector: jax.Array,
    rows: jax.Array,
    num_drafts: jax.Array,
) -> tuple[list[Pages], jax.Array, SpeculationState]:
    """Drafts `num_drafts` tokens (int32 scalar) for each decode of a step packed in `vector`.

    `rows` come from `pack_rows`, one for each decode; their positions count from the length of the
    sequence. Returns the pages with the drafter's keys and values, the page tables with the changes
    of `vector`, and the state with the drafts.
    """
    decodes = layout.unpack_decodes(tables, vector)
    lengths = speculation.lengths[decodes.slots]
    rows = rows.at[:, POSITION].add(lengths)

    def following(place: jax.Array, carry: _Carry) -> _Carry:
        """The draft at `place`, after the recent tokens."""
        kv, recent, drafts, probs = carry
        first = lengths + place - drafter.num_recent
        kv, logits = _logits(drafter, layout, params, kv, decodes, recent, first)
        own = rows.at[:, POSITION].add(place).at[:, PLACE].set(place)
        drafted = sample_drafts(logits, sampling, own, processors, drafts)[:, None]
        recent = jnp.concatenate([recent[:, 1:], drafted], axis=1)
        if probs is not None:
            drawn = distribution(logits, sampling, own, processors, drafts)
            drawn = drawn[:, None]
            probs = lax.dynamic_update_slice_in_dim(probs, drawn, place, axis=1)
        drafts = lax.dynamic_update_slice_in_dim(drafts, drafted, place, axis=1)
        return kv, recent, drafts, probs

    places = lengths[:, None] + jnp.arange(-drafter.num_recent, 0)
    history = speculation.history[decodes.slots]
    recent = jnp.take_along_axis(history, jnp.maximum(places, 0), axis=1)
    drafts = jnp.full((len(rows), speculation.drafts.shape[1]), NO_DRAFT)
    # One pass at least, for the keys and values of tokens that are drafted after later.
    passes = jnp.maximum(num_drafts, 1)
    probs = speculation.probs
    if probs is not None:
        probs = jnp.zeros((len(rows), *probs.shape[1:]), probs.dtype)
    kv, _, drafts, probs = lax.fori_loop(0, passes, following, (kv, recent, drafts, probs))
    state = speculation._replace(drafts=speculation.drafts.at[decodes.slots].set(drafts))
    if probs is not None:
        state = state._replace(probs=speculation.probs.at[decodes.slots].set(probs))
    return kv, decodes.tables, state


def _logits(
    drafter: Drafter,
    layout: StepLayout,
    params: Params,
    kv: list[Pages],
    decodes: DecodeRows,
    tokens: jax.Array,
    positions: jax.Array,
) -> tuple[list[Pages], jax.Array]:
    """Logits float32 [rows, vocab] after the last of `tokens` int32 [rows, n], the first of which
    are at `positions` int32 [rows]."""
    family, config, width = drafter.family, drafter.config, tokens.shape[1]
    layout = dataclasses.replace(layout, key=layout.key._replace(width=width))
    inputs = layout.decodes_at(decodes, positions)
    token_ids = jnp.maximum(tokens, 0).reshape(-1)
    x, shared = family.embed(params, config, token_ids, inputs.positions)
    shared = step.TokenInputs(shared, real=inputs.real if config.moe else None)
    kv, x = run_layers(drafter, layout, params, kv, x, shared, inputs.slot_mappings)
    hidden = family.final_norm(params, config, x[width - 1 :: width])
    return kv, family.logits(params, config, hidden)


def run_layers(
    drafter: Drafter, layout: StepLayout, params: Params, kv: list[Pages], *arrays: Any
) -> tuple[list[Pages], jax.Array]:
    """As `step.layers`, with the drafter's layers and what enters them in `arrays`."""
    config, own = drafter.config, params["layers"][: drafter.config.num_layers]
    kinds, places = config.layer_kinds, drafter.places
    kv, x, *_ = step.layers(drafter.family, config, layout, kinds, places, own, kv, *arrays)
    return kv, x


def sample_drafts(
    logits: jax.Array,
    sampling: SamplingState,
    rows: jax.Array,
    processors: Processors,
    drafts: jax.Array,
) -> jax.Array:
    """Tokens int32 [rows] with the noise of the rows' positions, NO_DRAFT where all are NaN."""
    masks = jnp.zeros((len(rows), mask_words(processors.vocab_size)), jnp.int32)
    return lax.cond(
        _all_plain(rows),
        lambda: sample_greedy(logits),
        lambda: sample_general(logits, sampling, rows, masks, processors, drafts)[0].token_ids,
    )


def _all_plain(rows: jax.Array) -> jax.Array:
    """Whether all rows take the most likely token."""
    floats = lax.bitcast_convert_type(rows, jnp.float32)
    plain = (floats[:, TEMPERATURE] == 0) & (rows[:, FLAGS] == 0)
    return jnp.all(plain & (rows[:, POSITION] >= rows[:, MIN_TOKENS]))


def best_drafts(
    logits: jax.Array,
    sampling: SamplingState,
    rows: jax.Array,
    processors: Processors,
    num: int,
) -> tuple[jax.Array, jax.Array]:
    """As `sample_drafts`, the `num` best tokens of each row, int32 [rows, num], different ones, and
    how likely they are (`sampling.candidates`). They are chosen as if no drafts came before."""
    return lax.cond(
        _all_plain(rows),
        lambda: most_likely(logits, num),
        lambda: candidates(logits, sampling, rows, processors, num),
    )


def prefill(
    drafter: Drafter,
    layout: StepLayout,
    params: Params,
    kv: list[Pages],
    tables: jax.Array,
    last_tokens: jax.Array,
    vector: jax.Array,
) -> tuple[list[Pages], jax.Array]:
    """The drafter's keys and values of a step's prefill chunks, packed in `vector`, and the page
    tables with its changes."""
    tables, x, shared, slot_mappings, _ = step.embed(
        drafter.family, drafter.config, layout, params, tables, last_tokens, None, vector
    )
    kv, _ = run_layers(drafter, layout, params, kv, x, shared, slot_mappings)
    return kv, tables


def draft_rows(shapes: ProgramShapes, step: PackedInputs, num_rows: int) -> np.ndarray:
    """What decides how the decodes of a step sample, int32 [num_rows, fields] (`pack_rows`), as
    far as drafts take part in it; positions count from the length of the sequence."""
    decodes = step.plan.decodes
    rows = pack_rows(
        [row.constants for row in step.rows[: len(decodes)]],
        [chunk.slot for chunk in decodes],
        [-chunk.seq.num_prompt for chunk in decodes],
        num_rows,
        shapes.trash_slot,
        len(shapes.processors.names),
    )
    rows[:, FLAGS] &= FLAG_BIAS | FLAG_PROCESSORS | FLAG_PENALTY | FLAG_BAD_WORDS
    return rows


class _DrafterKind(ProgramKind[int]):
    """A kind that runs a drafter over one part of a step: its decodes, or its prefill chunks."""

    def __init__(self, shapes: ProgramShapes, drafter: Drafter, set_tables: SetTables) -> None:
        super().__init__(shapes)
        self._drafter = drafter
        self._set_tables = set_tables

    def packed(self, state: DeviceState, layout: StepLayout, plan: StepPlan) -> np.ndarray:
        """The vector of `plan`, after page tables that change too much to be in it. `layout` is
        that of the part alone."""
        frozen = FrozenPlan.of(plan, self.shapes.kv_layout, self.shapes.trash_slot)
        self._set_tables(state, [frozen])
        return layout.pack(frozen)


class Draft(_DrafterKind):
    """Drafts for each decode, one after another."""

    title = "draft"
    pure = draft
    applies_processors = True
    reads = ("params", "kv", "tables", "speculation", "sampling")
    replaces = ("kv", "tables", "speculation")

    def keys(self) -> Iterable[int]:
        return self.shapes.buckets.rows

    def layout(self, key: int) -> StepLayout:
        # Rounding of drafts is of no consequence, so batch_invariant is not either.
        layout = self.shapes.layouts[self.shapes.buckets.pick(key, 0)]
        return dataclasses.replace(layout, tile=None)

    def static(self, key: int) -> tuple[Any, ...]:
        return self._drafter, self.layout(key), self.shapes.processors

    def uploads(self, key: int) -> tuple[Any, ...]:
        int32 = self.shapes.int32
        fields = NUM_FIELDS + len(self.shapes.processors.names)
        return int32(self.layout(key).size), int32(key, fields), int32()

    def __call__(self, state: DeviceState, step: PackedInputs) -> None:
        self.run(state, *self.packed_decodes(state, step), np.int32(step.plan.width - 1))

    def packed_decodes(
        self, state: DeviceState, step: PackedInputs
    ) -> tuple[int, np.ndarray, np.ndarray]:
        """The program for the decodes of a step, their packed vector, and how they sample."""
        decodes = step.plan.decodes
        key = holding(self.shapes.buckets.rows, len(decodes))
        vector = self.packed(state, self.layout(key), StepPlan(decodes))
        return key, vector, draft_rows(self.shapes, step, key)


class DraftPrefill(_DrafterKind):
    """Keeps the pages of a draft model up with those of the target."""

    title = "draft-prefill"
    pure = prefill
    reads = ("draft_params", "kv", "tables", "last_tokens")
    replaces = ("kv", "tables")

    def keys(self) -> Iterable[int]:
        return self.shapes.buckets.prefill_tokens

    def layout(self, key: int) -> StepLayout:
        layout = self.shapes.layouts[self.shapes.buckets.pick(0, key)]
        return dataclasses.replace(layout, tile=None)

    def static(self, key: int) -> tuple[Any, ...]:
        return self._drafter, self.layout(key)

    def uploads(self, key: int) -> tuple[Any, ...]:
        return (self.shapes.int32(self.layout(key).size),)

    def __call__(self, state: DeviceState, step: PackedInputs) -> None:
        plan = StepPlan(prefills=step.plan.prefills)
        key = holding(self.shapes.buckets.prefill_tokens, plan.num_prefill_tokens)
        self.run(state, key, self.packed(state, self.layout(key), plan))
