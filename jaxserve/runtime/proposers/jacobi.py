"""Drafts of what the model itself sampled: Jacobi and lookahead decoding (Fu et al. 2024).

A step samples a token after each draft, right or wrong. Those after the last draft that it accepted
are guesses at the tokens to come, better than the drafts that they replace: sampled with the noise
of their own positions, after contexts of which one token more is right. To verify them is Jacobi's
iteration for the equations `token = sample(tokens before it)`, whose solution is the sequence that
decoding gives. Where nothing was sampled yet, the guess is some token of the sequence, as in the
paper: to repeat the newest one took a little more steps.

Lookahead decoding also keeps n-grams: tokens each of which was sampled right after the one before,
in one step after another. The newest that begins with a sequence's newest token is drafted in place
of the first guesses. The state is of the slot: a sequence that comes back after a preemption begins
again, with the n-grams of its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.device_step import PackedInputs
from jaxserve.runtime.programs.page_programs import SetTables
from jaxserve.runtime.programs.program_kind import ProgramKind, padded
from jaxserve.runtime.programs.shapes.program import ProgramShapes, holding
from jaxserve.runtime.programs.speculation_programs import VerifyKey
from jaxserve.runtime.proposers.proposer import Proposer
from jaxserve.sampling.speculation import NO_DRAFT, Acceptance, SpeculationState, Trajectories

_STRIDE = 7919
"""Tokens from one first guess to the next, over and over through the sequence."""

_FIRST = 0
"""In the place of the tokens that a decode computed, for a sequence that is new in its slot."""


def iterate(
    width: int,
    state: SpeculationState,
    token_ids: jax.Array,
    slots: jax.Array,
    counts: jax.Array,
    num_tokens: jax.Array,
) -> SpeculationState:
    """State with the next drafts of the sequences in `slots` int32 [rows].

    `token_ids` int32 [at least rows * width] are the tokens sampled after each row's newest token
    and its drafts, of which `counts` int32 [rows] were computed, or _FIRST. The first `num_tokens`
    int32 [rows] of them were accepted, and the history has them.
    """
    rows, most = len(slots), state.drafts.shape[1]
    sampled = token_ids[: rows * width].reshape(rows, width)
    history, lengths, drafts = state.history[slots], state.lengths[slots], state.drafts[slots]

    # What comes after the newest token of before the step, and after each draft.
    places, counts = jnp.arange(most + 1), counts[:, None]
    computed = places < counts
    following = jnp.where(computed, _extended(sampled, most + 1), _extended(drafts, most + 1))
    following = jnp.where(counts == _FIRST, NO_DRAFT, following)
    known = _shifted(following, num_tokens)
    drafts = jnp.where(known == NO_DRAFT, _scattered(history, lengths, most), known)
    if state.trajectories is not None:
        paths, pool = (array[slots] for array in state.trajectories)
        size = pool.shape[2]
        before = _ngrams(history, lengths - num_tokens, 1, size - 1)
        inputs = jnp.concatenate([before, paths], axis=1)
        ngrams = jnp.concatenate([inputs, following[:, :, None]], axis=2)
        found = jnp.where(computed[:, :, None], ngrams, NO_DRAFT)[:, :width]
        pool = _pooled(found, pool)
        own = _ngrams(history, lengths, pool.shape[1], size)
        pool = jnp.where(counts[:, :, None] == _FIRST, own, pool)

        after = jnp.where(computed[:, :, None], ngrams[:, :, 1:], _extended(paths, most + 1))
        begun = _extended(drafts[:, :, None], size - 1, axis=2)[:, :, ::-1]
        paths = jnp.where((known == NO_DRAFT)[:, :, None], begun, _shifted(after, num_tokens))
        last = _ngrams(history, lengths, 1, size - 1)[:, 0]
        drafts, paths = _with_ngram(pool, last, drafts, paths)
        trajectories = Trajectories(
            state.trajectories.paths.at[slots].set(paths),
            state.trajectories.pool.at[slots].set(pool),
        )
        state = state._replace(trajectories=trajectories)
    return state._replace(drafts=state.drafts.at[slots].set(drafts))


def _ngrams(history: jax.Array, lengths: jax.Array, count: int, size: int) -> jax.Array:
    """The last n-grams of the first `lengths` int32 [rows] tokens of `history`, the last of all
    first: int32 [rows, count, size], NO_DRAFT before the first token."""
    places = lengths[:, None, None] - size - jnp.arange(count)[:, None] + jnp.arange(size)
    taken = jnp.take_along_axis(history[:, None], jnp.maximum(places, 0), axis=2)
    return jnp.where(places >= 0, taken, NO_DRAFT)


def _extended(array: jax.Array, count: int, axis: int = 1) -> jax.Array:
    """`array` [rows, n, ...] with NO_DRAFT up to `count` along an axis."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, count - array.shape[axis])
    return jnp.pad(array, widths, constant_values=NO_DRAFT)


def _shifted(array: jax.Array, by: jax.Array) -> jax.Array:
    """From `array` [rows, n, ...] n - 1 entries each from `by` int32 [rows] on, NO_DRAFT after the
    last."""
    most = array.shape[1] - 1
    places = by[:, None] + jnp.arange(most)
    places = places.reshape(*places.shape, *[1] * (array.ndim - 2))
    return jnp.take_along_axis(_extended(array, 2 * most + 1), places, axis=1)


def _scattered(history: jax.Array, lengths: jax.Array, count: int) -> jax.Array:
    """Tokens of the first `lengths` int32 [rows] of `history` from all over them, int32
    [rows, count]."""
    places = jnp.arange(count) * _STRIDE % jnp.maximum(lengths[:, None], 1)
    return jnp.take_along_axis(history, places, axis=1)


def _pooled(found: jax.Array, pool: jax.Array) -> jax.Array:
    """`pool` [rows, n-grams, n] with those of `found` [rows, m, n] that are whole as the newest."""
    both = jnp.concatenate([found, pool], axis=1)
    partial = jnp.any(found == NO_DRAFT, axis=2)
    partial = jnp.pad(partial, ((0, 0), (0, pool.shape[1])))
    order = jnp.argsort(partial, axis=1, stable=True)[:, : pool.shape[1], None]
    return jnp.take_along_axis(both, order, axis=1)


def _with_ngram(
    pool: jax.Array, last: jax.Array, drafts: jax.Array, paths: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Drafts and their paths with the newest n-gram that begins with the newest token in the place
    of the first, in the rows that have one; `last` int32 [rows, n - 1] are their last tokens."""
    count = last.shape[1]
    matches = pool[:, :, 0] == last[:, -1:]
    first = jnp.argmax(matches, axis=1)[:, None, None]
    ngram = jnp.take_along_axis(pool, first, axis=1)[:, 0, 1:]
    along = jnp.arange(count)[:, None] + jnp.arange(1, count + 1)
    path = jnp.concatenate([last, ngram], axis=1)[:, along]
    matched = jnp.any(matches, axis=1)[:, None]
    drafts = drafts.at[:, :count].set(jnp.where(matched, ngram, drafts[:, :count]))
    path = jnp.where(matched[:, :, None], path, paths[:, :count])
    return drafts, paths.at[:, :count].set(path)


class Iterate(ProgramKind[VerifyKey]):
    """The drafts that a step leaves for the next."""

    title = "jacobi-draft"
    pure = iterate
    reads = replaces = ("speculation",)

    def keys(self) -> Iterable[VerifyKey]:
        buckets = self.shapes.buckets
        return [VerifyKey(rows, width) for rows in buckets.rows for width in buckets.widths]

    def static(self, key: VerifyKey) -> tuple[Any, ...]:
        return (key.width,)

    def uploads(self, key: VerifyKey) -> tuple[Any, ...]:
        int32, per_row = self.shapes.int32, self.shapes.int32(key.rows)
        return int32(self.shapes.sampled(*key)), per_row, per_row, per_row

    def __call__(
        self,
        state: DeviceState,
        step: PackedInputs,
        width: int,
        token_ids: jax.Array,
        num_tokens: jax.Array,
    ) -> None:
        rows, decodes = holding(self.shapes.buckets.rows, len(step.sampled)), step.plan.decodes
        slots = padded([chunk.slot for chunk in step.sampled], rows, self.shapes.trash_slot)
        counts = padded([1 + chunk.num_drafts for chunk in decodes], rows, _FIRST)
        self.run(state, VerifyKey(rows, width), token_ids, slots, counts, num_tokens)


class JacobiProposer(Proposer):
    """No model drafts and nothing is computed before a step: the one before it has left the drafts,
    by "lookahead" with n-grams, by "jacobi" without."""

    def __init__(self, shapes: ProgramShapes, set_tables: SetTables) -> None:
        self._iterate = Iterate(shapes)
        self.kinds = (self._iterate,)

    def propose(self, state: DeviceState, step: PackedInputs) -> None:
        """The drafts are there."""

    def verified(
        self,
        state: DeviceState,
        step: PackedInputs,
        width: int,
        token_ids: jax.Array,
        acceptance: Acceptance,
    ) -> None:
        self._iterate(state, step, width, token_ids, acceptance.num_tokens)
