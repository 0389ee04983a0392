"""Trained heads guess several tokens ahead from one hidden state (models/medusa.py)."""

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
from jaxserve.models import medusa
from jaxserve.models.family import Family, Params
from jaxserve.models.medusa import MedusaConfig
from jaxserve.runtime.in_flight import PackedInputs
from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.executables import ProgramSpec
from jaxserve.runtime.programs.page_programs import SetTables
from jaxserve.runtime.programs.program_kind import ProgramKind
from jaxserve.runtime.programs.shapes.program import ProgramShapes, holding
from jaxserve.runtime.proposers.drafter import draft_rows, sample_drafts
from jaxserve.runtime.proposers.proposer import Proposer
from jaxserve.sampling import SamplingState
from jaxserve.sampling.processors import Processors
from jaxserve.sampling.rows import NUM_FIELDS, PLACE, POSITION, SLOT
from jaxserve.sampling.speculation import NO_DRAFT, SpeculationState


def guess(
    family: Family,
    config: ModelConfig,
    heads: MedusaConfig,
    processors: Processors,
    head: Params,
    params: Params,
    speculation: SpeculationState,
    sampling: SamplingState,
    rows: jax.Array,
    num_drafts: jax.Array,
) -> SpeculationState:
    """State with `num_drafts` drafts (int32 scalar) for each of `rows`, from the hidden states that
    their newest tokens were sampled from. `head` are the model's parameters outside its layers,
    `params` those of the heads; `rows` as in `drafter.draft`."""
    slots = rows[:, SLOT]
    hidden = speculation.hidden[slots]
    rows = rows.at[:, POSITION].add(speculation.lengths[slots])

    def following(place: jax.Array, drafts: jax.Array) -> jax.Array:
        logits = family.logits(head, config, medusa.head(params, heads, place, hidden))
        own = rows.at[:, POSITION].add(place).at[:, PLACE].set(place)
        drafted = sample_drafts(logits, sampling, own, processors, drafts)[:, None]
        return lax.dynamic_update_slice_in_dim(drafts, drafted, place, axis=1)

    drafts = jnp.full((len(rows), speculation.drafts.shape[1]), NO_DRAFT)
    drafts = lax.fori_loop(0, num_drafts, following, drafts)
    return speculation._replace(drafts=speculation.drafts.at[slots].set(drafts))


class Guess(ProgramKind[int]):
    """Drafts for each decode, each by a head of its own."""

    title = "guess"
    pure = guess
    reads = ("outside_layers", "draft_params", "speculation", "sampling")
    replaces = ("speculation",)

    def keys(self) -> Iterable[int]:
        return self.shapes.buckets.rows

    def static(self, key: int) -> tuple[Any, ...]:
        shapes = self.shapes
        return shapes.family, shapes.local_model, shapes.medusa, shapes.processors

    def uploads(self, key: int) -> tuple[Any, ...]:
        fields = NUM_FIELDS + len(self.shapes.processors.names)
        return self.shapes.int32(key, fields), self.shapes.int32()

    def spec(self, key: int) -> ProgramSpec:
        by_name = not self.shapes.processors.names
        return dataclasses.replace(super().spec(key), cached_by_name=by_name)

    def __call__(self, state: DeviceState, step: PackedInputs) -> None:
        key = holding(self.shapes.buckets.rows, len(step.plan.decodes))
        rows = draft_rows(self.shapes, step, key)
        self.run(state, key, rows, np.int32(step.plan.width - 1))


class MedusaProposer(Proposer):
    """Heads with parameters of their own and no KV: the hidden state that a step sampled a
    sequence's newest token from stays on the device for the next step."""

    def __init__(self, shapes: ProgramShapes, set_tables: SetTables) -> None:
        self._guess = Guess(shapes)
        self.kinds = (self._guess,)

    def propose(self, state: DeviceState, step: PackedInputs) -> None:
        if step.plan.width > 1:
            self._guess(state, step)


def check_heads(heads: MedusaConfig, target: ModelConfig, num_drafts: int) -> None:
    """Raises ConfigError for heads that do not fit the target, or guess fewer tokens ahead."""
    for name in ("hidden_size", "vocab_size"):
        theirs, ours = getattr(heads, name), getattr(target, name)
        if theirs != ours:
            raise ConfigError(
                f"the heads of speculative_config have a {name} of {theirs}, and the model of "
                f"{ours}; train them for this model."
            )
    if num_drafts > heads.num_heads:
        raise ConfigError(
            f"num_speculative_tokens of speculative_config is {num_drafts}, but there are "
            f"{heads.num_heads} heads, one for each token; set it to at most {heads.num_heads}."
        )
