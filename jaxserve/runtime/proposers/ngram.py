"""Prompt lookup: drafts what followed the last tokens where they occurred before."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.core.settings.speculative import SpeculativeConfig
from jaxserve.core.steps.plan import ScheduledChunk
from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.device_step import PackedInputs
from jaxserve.runtime.programs.page_programs import SetTables
from jaxserve.runtime.programs.program_kind import ProgramKind, padded
from jaxserve.runtime.programs.shapes.program import ProgramShapes, holding
from jaxserve.runtime.proposers.proposer import Proposer
from jaxserve.sampling.speculation import NO_DRAFT, SpeculationState


def lookup(
    config: SpeculativeConfig, history: jax.Array, lengths: jax.Array, num_drafts: int
) -> jax.Array:
    """Drafts int32 [rows, num_drafts] by prompt lookup, NO_DRAFT where there is none.

    `history` int32 [rows, positions], of which `lengths` int32 [rows] are valid. The drafts follow
    the first of the longest earlier occurrences of the last tokens; where the tokens end before the
    drafts do, they are taken to repeat.
    """
    positions = jnp.arange(history.shape[1])
    alike = positions < lengths[:, None] - 1
    # For each position, how many tokens up to there are those at the end.
    matched = jnp.zeros(history.shape, jnp.int32)
    for back in range(config.prompt_lookup_max):
        last = jnp.take_along_axis(history, jnp.maximum(lengths - 1 - back, 0)[:, None], axis=1)
        shifted = jnp.pad(history, ((0, 0), (back, 0)), constant_values=NO_DRAFT)
        alike &= shifted[:, : history.shape[1]] == last
        alike &= positions >= back
        matched += alike
    longest = jnp.max(matched, axis=1, keepdims=True)
    first = jnp.argmax(matched, axis=1)[:, None] + 1
    period = jnp.maximum(lengths[:, None] - first, 1)
    drafts = jnp.take_along_axis(history, first + jnp.arange(num_drafts) % period, axis=1)
    return jnp.where(longest >= config.prompt_lookup_min, drafts, NO_DRAFT)


def look_up(
    config: SpeculativeConfig, state: SpeculationState, slots: jax.Array
) -> SpeculationState:
    """State with drafts by prompt lookup for the sequences in `slots` int32 [rows]."""
    num_drafts = state.drafts.shape[1]
    drafts = lookup(config, state.history[slots], state.lengths[slots], num_drafts)
    return state._replace(drafts=state.drafts.at[slots].set(drafts))


class LookUp(ProgramKind[int]):
    """Looks up the last tokens of each row."""

    title = "ngram-draft"
    pure = look_up
    reads = replaces = ("speculation",)

    def keys(self) -> Iterable[int]:
        return self.shapes.buckets.rows

    def static(self, key: int) -> tuple[Any, ...]:
        return (self.shapes.config.speculative_config,)

    def uploads(self, key: int) -> tuple[Any, ...]:
        return (self.shapes.int32(key),)

    def __call__(self, state: DeviceState, decodes: SequenceOf[ScheduledChunk]) -> None:
        rows = holding(self.shapes.buckets.rows, len(decodes))
        slots = padded([chunk.slot for chunk in decodes], rows, self.shapes.trash_slot)
        self.run(state, rows, slots)


class NgramProposer(Proposer):
    """Prompt lookup, in the tokens that the device has of every sequence."""

    def __init__(self, shapes: ProgramShapes, set_tables: SetTables) -> None:
        self._look_up = LookUp(shapes)
        self.kinds = (self._look_up,)

    def propose(self, state: DeviceState, step: PackedInputs) -> None:
        if step.plan.width > 1:
            self._look_up(state, step.plan.decodes)
