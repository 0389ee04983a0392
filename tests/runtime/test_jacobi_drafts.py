"""Drafts of the model's own samples and the n-grams among them, against a naive account of both."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.runtime.proposers.jacobi import iterate
from jaxserve.sampling.speculation import NO_DRAFT, POOL_SIZE, abstract_speculation, verify

CONTEXT, DRAFTS = 64, 4
WIDTH = 1 + DRAFTS


class Naive:
    """One sequence."""

    def __init__(self, prompt: list[int], size: int | None) -> None:
        self.tokens, self._size = list(prompt), size
        self.drafts = [self._guess(place) for place in range(DRAFTS)]
        if size is None:
            return
        self.paths = [[NO_DRAFT] * (size - 2) + [draft] for draft in self.drafts]
        starts = range(len(prompt) - size, -1, -1)
        self.pool = [prompt[start : start + size] for start in starts]
        self._put_ngram()

    def step(self, sampled: list[int]) -> None:
        """A step that sampled after the newest token and as many drafts as there are more."""
        kept = 1
        while kept < len(sampled) and self.drafts[kept - 1] == sampled[kept - 1]:
            kept += 1
        following = sampled + self.drafts[len(sampled) :]
        if self._size is not None:
            inputs = [self._last(), *self.paths]
            ngrams = [[*path, token] for path, token in zip(inputs, sampled)]
            self.pool = [ngram for ngram in ngrams if NO_DRAFT not in ngram] + self.pool
            del self.pool[POOL_SIZE:]
            paths = [ngram[1:] for ngram in ngrams] + self.paths[len(sampled) :]
            self.paths = paths[kept:]
        self.tokens += sampled[:kept]
        self.drafts = following[kept:]
        while len(self.drafts) < DRAFTS:
            self.drafts.append(self._guess(len(self.drafts)))
            if self._size is not None:
                self.paths.append([NO_DRAFT] * (self._size - 2) + self.drafts[-1:])
        if self._size is not None:
            self._put_ngram()

    def _guess(self, place: int) -> int:
        return self.tokens[7919 * place % len(self.tokens)]

    def _last(self) -> list[int]:
        count = self._size - 1
        return [NO_DRAFT] * (count - len(self.tokens)) + self.tokens[-count:]

    def _put_ngram(self) -> None:
        for ngram in self.pool:
            if ngram[0] == self.tokens[-1]:
                line, count = self._last() + ngram[1:], self._size - 1
                self.drafts[:count] = ngram[1:]
                self.paths[:count] = [line[i + 1 : i + 1 + count] for i in range(count)]
                return


@functools.cache
def programs(size: int | None):
    shapes = abstract_speculation(1, CONTEXT, DRAFTS, ngram_size=size)

    def begin(prompt: jax.Array, length: jax.Array):
        """From the state of another sequence."""
        state = jax.tree.map(lambda shape: jnp.ones(shape.shape, jnp.int32), shapes)
        state = state._replace(
            history=state.history.at[0].set(prompt), lengths=state.lengths.at[0].set(length)
        )
        first, zero = jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32)
        return iterate(1, state, prompt[length - 1][None], zero, zero, first)

    def step(state, sampled: jax.Array, count: jax.Array):
        slots = jnp.zeros(1, jnp.int32)
        state, _, acceptance = verify(
            WIDTH, 0, state, jnp.zeros(2, jnp.int32), sampled, slots, count
        )
        return iterate(WIDTH, state, sampled, slots, count, acceptance.num_tokens)

    return shapes.history.shape[1], jax.jit(begin), jax.jit(step)


@pytest.mark.parametrize("size", [None, 2, 3, WIDTH])
@settings(max_examples=20, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    steps=st.lists(
        st.tuples(st.integers(1, WIDTH), st.lists(st.integers(0, 2), min_size=1, max_size=WIDTH)),
        max_size=6,
    ),
)
def test_drafts_and_ngrams_are_those_of_a_naive_account(size, prompt, steps):
    """The first drafts of a step are right, as many as it says."""
    length, begin, step = programs(size)
    history = np.zeros(length, np.int32)
    history[: len(prompt)] = prompt
    state, naive = begin(history, np.int32(len(prompt))), Naive(prompt, size)
    for right, rest in [(0, []), *steps]:
        if rest:
            sampled = (naive.drafts[: right - 1] + rest)[:WIDTH]
            padded = np.zeros(WIDTH, np.int32)
            padded[: len(sampled)] = sampled
            state = step(state, padded, np.array([len(sampled)], np.int32))
            naive.step(sampled)
        assert state.history[0, : state.lengths[0]].tolist() == naive.tokens
        assert state.drafts[0].tolist() == naive.drafts
        if size is not None:
            assert state.trajectories.paths[0].tolist() == naive.paths
            pool = np.asarray(state.trajectories.pool[0])
            pool = pool[pool.min(axis=1) != NO_DRAFT]
            assert pool.tolist() == naive.pool


def passes(size: int | None, prompt: list[int], model: Callable[[list[int]], int]) -> list[int]:
    """Tokens that each of twelve passes gains, whose tokens are `model` of those before."""
    length, begin, step = programs(size)
    history = np.zeros(length, np.int32)
    history[: len(prompt)] = prompt
    state, gained = begin(history, np.int32(len(prompt))), []
    for _ in range(12):
        count = int(state.lengths[0])
        chain = [*state.history[0, :count].tolist(), *state.drafts[0].tolist()]
        sampled = [model(chain[: count + place]) for place in range(WIDTH)]
        state = step(state, np.array(sampled, np.int32), np.array([WIDTH], np.int32))
        gained.append(int(state.lengths[0]) - count)
    return gained


def test_samples_that_no_draft_changes_are_right_at_once():
    """Every second pass gains all drafts: those sampled after wrong ones."""
    noise = np.random.default_rng(1).integers(100, 999, CONTEXT)
    assert passes(None, [1, 2, 3], lambda before: int(noise[len(before)])) == [1, WIDTH] * 6


def test_ngrams_follow_a_circle():
    """Tokens that depend on the newest alone: Jacobi's guesses stay behind them, and n-grams are
    right once the sequence has gone round."""

    def circle(before: list[int]) -> int:
        return (before[-1] + 1) % 6

    assert passes(None, [9, 0], circle) == [1] * 12
    assert passes(WIDTH, [9, 0], circle) == [1] * 6 + [WIDTH] * 6
