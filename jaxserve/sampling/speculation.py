"""Speculative decoding on the device: acceptance of drafts (runtime/proposers makes them).

A decode row computes its newest token and its drafts. Each of these tokens samples the next one as
it would without drafts, with the noise of its own position; a draft is kept while it equals the
token sampled before it. So the output equals that of decoding without drafts. The host learns how
many drafts were kept only when it reads the step: lengths and positions stay on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

NO_DRAFT = -1


class SpeculationState(NamedTuple):
    """Per-slot arrays, int32 but for `hidden`; the last row is for padding.

    `history` [slots + 1, context limit + width]: tokens by position, of which the first `lengths`
    [slots + 1] are valid. `drafts` [slots + 1, k]: guesses of the next ones, or NO_DRAFT; those of
    a step's decodes are made before it runs. `hidden` [slots + 1, hidden], for drafters that guess
    from it: the hidden state that the newest token was sampled from, or the one that the drafter
    expects after it. `gained` [slots + 1], for drafters that follow the model's hidden states: the
    tokens that the last step added.
    """

    history: jax.Array
    lengths: jax.Array
    drafts: jax.Array
    hidden: jax.Array | None = None
    gained: jax.Array | None = None


class Acceptance(NamedTuple):
    """For each row of a step int32 [rows]: tokens that it gained, and drafts that it verified."""

    num_tokens: jax.Array
    num_drafts: jax.Array


def abstract_speculation(
    num_slots: int,
    max_len: int,
    num_drafts: int,
    hidden: jax.ShapeDtypeStruct | None = None,
    *,
    gained: bool = False,
) -> SpeculationState:
    """Shapes of the state of `num_slots` slots and one for padding; `hidden` is the shape of one
    slot's hidden state, if it is kept, and `gained` says whether those tokens are counted."""
    rows = num_slots + 1
    shapes = (rows, max_len + num_drafts + 1), (rows,), (rows, num_drafts)
    if hidden is not None:
        hidden = jax.ShapeDtypeStruct((rows, *hidden.shape), hidden.dtype)
    arrays = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
    return SpeculationState(
        *arrays, hidden, jax.ShapeDtypeStruct((rows,), jnp.int32) if gained else None
    )


def set_history(
    state: SpeculationState, slot: jax.Array, tokens: jax.Array, length: jax.Array
) -> SpeculationState:
    """State with the first `length` of `tokens` int32 [context limit + width] in `slot`."""
    return state._replace(
        history=state.history.at[slot].set(tokens), lengths=state.lengths.at[slot].set(length)
    )


def verify(
    width: int,
    state: SpeculationState,
    last_tokens: jax.Array,
    token_ids: jax.Array,
    slots: jax.Array,
    counts: jax.Array,
    hidden: jax.Array | None = None,
) -> tuple[SpeculationState, jax.Array, Acceptance]:
    """Accepts the drafts of a step.

    The rows are of the sequences in `slots` int32 [rows]. `token_ids` int32 [at least rows * width]
    are the tokens sampled after each row's newest token and its drafts, of which `counts` int32
    [rows] were computed; `hidden` [at least rows * width, hidden] is what they were sampled from,
    where the state keeps it. Returns the state, `last_tokens` int32 [slots + 1] with the newest
    token of each row, and what each row gained.
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
    state = state._replace(
        history=state.history.at[slots[:, None], where].set(sampled, mode="drop"),
        lengths=state.lengths.at[slots].set(before + num_tokens),
    )
    if hidden is not None:
        newest_hidden = hidden[jnp.arange(rows) * width + accepted]
        state = state._replace(hidden=state.hidden.at[slots].set(newest_hidden))
    if state.gained is not None:
        state = state._replace(gained=state.gained.at[slots].set(num_tokens))
    return state, last_tokens, Acceptance(num_tokens, jnp.sum(drafted, axis=1))
