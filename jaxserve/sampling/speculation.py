"""Speculative decoding on the device: acceptance of drafts, and the next drafts.

A decode row computes its newest token and its drafts. Each of these tokens samples the next one as
it would without drafts, with the noise of its own position; a draft is kept while it equals the
token sampled before it. So the output equals that of decoding without drafts. The host learns how
many drafts were kept only when it reads the step: lengths and positions stay on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.core.speculative import SpeculativeConfig

NO_DRAFT = -1


class SpeculationState(NamedTuple):
    """Per-slot arrays, int32; the last row is for padding.

    `history` [slots + 1, context limit + width]: tokens by position, of which the first `lengths`
    [slots + 1] are valid. `drafts` [slots + 1, k]: guesses of the next ones, or NO_DRAFT.
    """

    history: jax.Array
    lengths: jax.Array
    drafts: jax.Array


class Acceptance(NamedTuple):
    """For each row of a step int32 [rows]: tokens that it gained, and drafts that it verified."""

    num_tokens: jax.Array
    num_drafts: jax.Array


def abstract_speculation(num_slots: int, max_len: int, num_drafts: int) -> SpeculationState:
    """Shapes of the state of `num_slots` slots and one for padding."""
    shapes = (
        (num_slots + 1, max_len + num_drafts + 1),
        (num_slots + 1,),
        (num_slots + 1, num_drafts),
    )
    return SpeculationState(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))


def set_history(
    state: SpeculationState, slot: jax.Array, tokens: jax.Array, length: jax.Array
) -> SpeculationState:
    """State with the first `length` of `tokens` int32 [context limit + width] in `slot`."""
    return SpeculationState(
        state.history.at[slot].set(tokens),
        state.lengths.at[slot].set(length),
        state.drafts.at[slot].set(NO_DRAFT),
    )


def verify(
    config: SpeculativeConfig,
    width: int,
    state: SpeculationState,
    last_tokens: jax.Array,
    token_ids: jax.Array,
    slots: jax.Array,
    counts: jax.Array,
) -> tuple[SpeculationState, jax.Array, Acceptance]:
    """Accepts the drafts of a step, and drafts for the next.

    The rows are of the sequences in `slots` int32 [rows]. `token_ids` int32 [at least rows * width]
    are the tokens sampled after each row's newest token and its drafts, of which `counts` int32
    [rows] were computed. Returns the state, `last_tokens` int32 [slots + 1] with the newest token
    of each row, and what each row gained.
    """
    rows, trash = len(slots), len(last_tokens) - 1
    sampled = token_ids[: rows * width].reshape(rows, width)
    place = jnp.arange(width)
    drafts = state.drafts[slots, : width - 1]
    drafted = (drafts != NO_DRAFT) & (place[1:] < counts[:, None])
    equal = drafted & (drafts == sampled[:, :-1])
    accepted = jnp.sum(jnp.cumprod(equal.astype(jnp.int32), axis=1), axis=1)
    num_tokens = jnp.where(slots == trash, 0, accepted + 1)

    newest = jnp.take_along_axis(sampled, accepted[:, None], axis=1)[:, 0]
    last_tokens = last_tokens.at[slots].set(jnp.maximum(newest, 0))
    before = state.lengths[slots]
    kept = place < num_tokens[:, None]
    width_of_history = state.history.shape[1]
    where = jnp.where(kept, before[:, None] + place, width_of_history)
    history = state.history.at[slots[:, None], where].set(sampled, mode="drop")
    lengths = before + num_tokens
    state = SpeculationState(
        history,
        state.lengths.at[slots].set(lengths),
        state.drafts.at[slots].set(lookup(config, history[slots], lengths, state.drafts.shape[1])),
    )
    return state, last_tokens, Acceptance(num_tokens, jnp.sum(drafted, axis=1))


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
