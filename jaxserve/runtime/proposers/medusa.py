"""Trained heads guess several tokens ahead from one hidden state (models/drafters/medusa.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.core.errors import ConfigError
from jaxserve.core.model_config import ModelConfig
from jaxserve.core.settings.draft_tree import Path, parents, ways
from jaxserve.core.settings.speculative import SpeculativeConfig
from jaxserve.models.drafters import medusa
from jaxserve.models.drafters.medusa import MedusaConfig
from jaxserve.models.family import Family, Params
from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.device_step import PackedInputs
from jaxserve.runtime.programs.page_programs import SetTables
from jaxserve.runtime.programs.program_kind import ProgramKind, padded
from jaxserve.runtime.programs.shapes.program import ProgramShapes, holding
from jaxserve.runtime.proposers.drafter import best_drafts, draft_rows, sample_drafts
from jaxserve.runtime.proposers.proposer import Proposer
from jaxserve.sampling import SamplingState, distribution
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

    def following(place: jax.Array, carry: _Carry) -> _Carry:
        drafts, probs = carry
        logits = family.logits(head, config, medusa.head(params, heads, place, hidden))
        own = rows.at[:, POSITION].add(place).at[:, PLACE].set(place)
        if probs is not None:
            drawn = distribution(logits, sampling, own, processors, drafts)[:, None]
            probs = lax.dynamic_update_slice_in_dim(probs, drawn, place, axis=1)
        drafted = sample_drafts(logits, sampling, own, processors, drafts)[:, None]
        return lax.dynamic_update_slice_in_dim(drafts, drafted, place, axis=1), probs

    drafts = jnp.full((len(rows), speculation.drafts.shape[1]), NO_DRAFT)
    probs = speculation.probs
    if probs is not None:
        probs = jnp.zeros((len(rows), *probs.shape[1:]), probs.dtype)
    drafts, probs = lax.fori_loop(0, num_drafts, following, (drafts, probs))
    state = speculation._replace(drafts=speculation.drafts.at[slots].set(drafts))
    return state if probs is None else _with_probs(state, slots, probs)


_Carry = tuple[jax.Array, jax.Array | None]
"""Drafts int32 [rows, most], and where they are kept the distributions that they were drawn from,
float32 [rows, most, padded vocab]."""


def _with_probs(state: SpeculationState, slots: jax.Array, probs: jax.Array) -> SpeculationState:
    return state._replace(probs=state.probs.at[slots].set(probs))


def guess_tree(
    family: Family,
    config: ModelConfig,
    heads: MedusaConfig,
    processors: Processors,
    tree: tuple[Path, ...],
    head: Params,
    params: Params,
    speculation: SpeculationState,
    sampling: SamplingState,
    rows: jax.Array,
    stops: jax.Array,
) -> SpeculationState:
    """As `guess`, with the drafts of a `tree`: those at a depth are the best guesses of its head,
    whatever comes before them. A draft whose KV would not be before `stops` int32 [rows] is left
    out, and so are those after what is no draft."""
    slots = rows[:, SLOT]
    lengths, hidden = speculation.lengths[slots], speculation.hidden[slots]
    rows = rows.at[:, POSITION].add(lengths)
    ranks = np.array([path[-1] for path in tree])
    places = np.array([len(path) - 1 for path in tree])

    def best(place: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        logits = family.logits(head, config, medusa.head(params, heads, place, hidden))
        own = rows.at[:, POSITION].add(place)
        found, _ = best_drafts(logits, sampling, own, processors, int(ranks.max()) + 1)
        if speculation.probs is None:
            return found, None
        return found, distribution(logits, sampling, own, processors)

    guesses, probs = lax.map(best, jnp.arange(places.max() + 1))
    drafts = guesses[places, :, ranks].T
    last = lengths[:, None] + np.arange(len(tree))
    drafts = jnp.where(last < stops[:, None], drafts, NO_DRAFT)
    whole = jnp.all(drafts[:, np.array(ways(tree))] != NO_DRAFT, axis=2)
    drafts = jnp.where(whole, drafts, NO_DRAFT)
    follows = jnp.broadcast_to(jnp.asarray(parents(tree), jnp.int32), drafts.shape)
    state = speculation._replace(
        drafts=speculation.drafts.at[slots].set(drafts),
        parents=speculation.parents.at[slots].set(follows),
    )
    return state if probs is None else _with_probs(state, slots, jnp.moveaxis(probs, 0, 1))


class Guess(ProgramKind[int]):
    """Drafts for each decode, each by a head of its own."""

    title = "medusa-draft"
    pure = guess
    applies_processors = True
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

    def __call__(self, state: DeviceState, step: PackedInputs) -> None:
        key = holding(self.shapes.buckets.rows, len(step.plan.decodes))
        rows = draft_rows(self.shapes, step, key)
        self.run(state, key, rows, np.int32(step.plan.width - 1))


class GuessTree(Guess):
    """A tree of drafts for each decode, each depth by a head of its own."""

    title = "medusa-draft-tree"
    pure = guess_tree

    def static(self, key: int) -> tuple[Any, ...]:
        return *super().static(key), self.shapes.config.speculative_config.speculative_token_tree

    def uploads(self, key: int) -> tuple[Any, ...]:
        return super().uploads(key)[0], self.shapes.int32(key)

    def __call__(self, state: DeviceState, step: PackedInputs) -> None:
        key = holding(self.shapes.buckets.rows, len(step.plan.decodes))
        stops = padded([chunk.stop for chunk in step.plan.decodes], key, 0)
        self.run(state, key, draft_rows(self.shapes, step, key), stops)


class MedusaProposer(Proposer):
    """Heads with parameters of their own and no KV: the hidden state that a step sampled a
    sequence's newest token from stays on the device for the next step."""

    def __init__(self, shapes: ProgramShapes, set_tables: SetTables) -> None:
        self._guess = (GuessTree if shapes.tree_depth else Guess)(shapes)
        self.kinds = (self._guess,)

    def propose(self, state: DeviceState, step: PackedInputs) -> None:
        if step.plan.width > 1:
            self._guess(state, step)


def check_heads(heads: MedusaConfig, target: ModelConfig, speculative: SpeculativeConfig) -> None:
    """Raises ConfigError for heads that do not fit the target, or guess fewer tokens ahead."""
    for name in ("hidden_size", "vocab_size"):
        theirs, ours = getattr(heads, name), getattr(target, name)
        if theirs != ours:
            raise ConfigError(
                f"the heads of speculative_config have a {name} of {theirs}, and the model of "
                f"{ours}; train them for this model."
            )
    depth, num_drafts = speculative.tree_depth, speculative.lengths[-1]
    if depth > heads.num_heads:
        raise ConfigError(
            f"speculative_token_tree of speculative_config has paths of {depth} drafts, but there "
            f"are {heads.num_heads} heads, one for each depth; leave out paths longer than "
            f"{heads.num_heads}."
        )
    if not depth and num_drafts > heads.num_heads:
        raise ConfigError(
            f"num_speculative_tokens of speculative_config is {num_drafts}, but there are "
            f"{heads.num_heads} heads, one for each token; set it to at most {heads.num_heads}."
        )
