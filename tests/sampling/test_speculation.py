"""Drafts by prompt lookup, against a naive search; acceptance, against the definition."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.settings.speculative import SpeculativeConfig
from jaxserve.runtime.proposers.ngram import lookup
from jaxserve.sampling.speculation import (
    NO_DRAFT,
    SpeculationState,
    abstract_speculation,
    set_history,
    verify,
)

CONTEXT, DRAFTS, SLOTS = 24, 3, 3
SIZES = [(1, 1), (1, 3), (2, 2), (2, 4), (4, 4)]
TRASH = SLOTS


def naive(tokens: list[int], shortest: int, longest: int) -> list[int]:
    for size in range(longest, shortest - 1, -1):
        for first in range(len(tokens) - size):
            if tokens[first : first + size] == tokens[len(tokens) - size :]:
                following = tokens[first + size :]
                return list(itertools.islice(itertools.cycle(following), DRAFTS))
    return [NO_DRAFT] * DRAFTS


@functools.cache
def looked_up(shortest: int, longest: int):
    config = SpeculativeConfig(DRAFTS, prompt_lookup_min=shortest, prompt_lookup_max=longest)
    return jax.jit(lambda history, lengths: lookup(config, history, lengths, DRAFTS))


@settings(max_examples=200, deadline=None)
@given(
    size=st.sampled_from(SIZES),
    rows=st.lists(
        st.lists(st.integers(0, 2), min_size=1, max_size=CONTEXT), min_size=SLOTS, max_size=SLOTS
    ),
    stale=st.integers(0, 2),
)
def test_drafts_are_those_of_a_naive_search(size, rows, stale):
    history = np.full((SLOTS, CONTEXT + DRAFTS + 1), stale, np.int32)
    for row, tokens in zip(history, rows):
        row[: len(tokens)] = tokens
    drafts = looked_up(*size)(history, np.array([*map(len, rows)], np.int32))
    assert np.asarray(drafts).tolist() == [naive(tokens, *size) for tokens in rows]


@pytest.mark.parametrize("width", [1, 1 + DRAFTS])
def test_tokens_are_kept_up_to_the_first_wrong_draft(width):
    shapes = abstract_speculation(SLOTS, CONTEXT, DRAFTS)
    state = jax.tree.map(lambda shape: jnp.zeros(shape.shape, jnp.int32), shapes)
    prompt = [7, 8, 9, 7]
    for slot in range(SLOTS):
        padded = np.zeros(shapes.history.shape[1], np.int32)
        padded[: len(prompt)] = prompt
        state = set_history(state, slot, padded, len(prompt))
    drafts = np.array([[1, 2, 3], [1, 2, 3], [1, NO_DRAFT, NO_DRAFT], [0, 0, 0]], np.int32)
    state = state._replace(drafts=jnp.asarray(drafts))
    # All right; the second wrong; one draft; padding.
    slots, counts = np.array([0, 1, 2, TRASH], np.int32), np.array([4, 4, 4, 1], np.int32)
    sampled = np.array([[1, 2, 3, 4], [1, 5, 3, 4], [1, 6, 3, 4], [0, 0, 0, 0]], np.int32)
    kept = [4, 2, 2, 0] if width > 1 else [1, 1, 1, 0]
    after, last_tokens, acceptance = verify(
        width,
        0,
        state,
        jnp.zeros(SLOTS + 1, jnp.int32),
        sampled[:, :width].reshape(-1),
        slots,
        counts,
    )
    assert isinstance(after, SpeculationState)
    assert acceptance.num_tokens.tolist() == kept
    assert acceptance.num_drafts.tolist() == ([3, 3, 1, 0] if width > 1 else [0] * 4)
    for row, (slot, num_tokens) in enumerate(zip(slots[:3], kept)):
        tokens = prompt + sampled[row, :num_tokens].tolist()
        assert after.lengths[slot] == len(tokens)
        assert after.history[slot, : len(tokens)].tolist() == tokens
        assert last_tokens[slot] == tokens[-1]
    assert after.lengths[TRASH] == 0


def test_no_draft_is_verified_that_was_not_computed():
    shapes = abstract_speculation(1, CONTEXT, DRAFTS)
    state = jax.tree.map(lambda shape: jnp.ones(shape.shape, jnp.int32), shapes)
    *_, acceptance = verify(
        1 + DRAFTS,
        0,
        state,
        jnp.zeros(2, jnp.int32),
        jnp.ones(1 + DRAFTS, jnp.int32),
        jnp.array([0]),
        jnp.array([2]),
    )
    assert acceptance.num_tokens.tolist() == [2]
    assert acceptance.num_drafts.tolist() == [1]
