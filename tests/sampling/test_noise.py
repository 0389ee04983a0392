"""The noise of sampling: a function of seed, position and token, and as random as it must be."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxserve.sampling.noise import exponentials

noise = jax.jit(exponentials)
VOCAB = 50_000


def seed_words(*seeds):
    return np.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], np.uint32)


def chi_square(counts, expected):
    return ((counts - expected) ** 2 / expected).sum()


def limit(freedom):
    return freedom + 5 * np.sqrt(2 * freedom)


def test_a_row_and_a_part_of_the_vocabulary_are_the_same_alone():
    seeds, positions = seed_words(0, 1, 2**32, 2**64 - 1), np.array([0, 0, 1, 2**30], np.int32)
    tokens = np.arange(1000, dtype=np.int32)
    together = np.asarray(noise(seeds, positions, tokens))
    for row in range(4):
        part = slice(300, 817)
        alone = noise(seeds[row : row + 1], positions[row : row + 1], tokens[part])
        np.testing.assert_array_equal(alone[0], together[row, part])
    assert len(np.unique(together)) > 0.99 * together.size


@pytest.mark.parametrize("vary", ["seed", "position", "token"])
def test_variates_are_exponential(vary):
    """Along each argument: 50 equally likely intervals, the mean and the variance."""
    count = 200_000
    if vary == "token":
        sample = noise(seed_words(7), np.zeros(1, np.int32), np.arange(count, dtype=np.int32))[0]
    else:
        rows = np.arange(count, dtype=np.int32)
        seeds = seed_words(*(rows.tolist() if vary == "seed" else [7] * count))
        positions = rows if vary == "position" else np.zeros(count, np.int32)
        sample = noise(seeds, positions, np.array([123], np.int32))[:, 0]
    sample = np.asarray(sample, np.float64)
    assert sample.min() > 0 and np.isfinite(sample).all()
    counts = np.histogram(np.exp(-sample), bins=50, range=(0, 1))[0]
    assert chi_square(counts, count / 50) < limit(49)
    assert abs(sample.mean() - 1) < 5 / np.sqrt(count)
    assert abs(sample.var() - 1) < 5 * np.sqrt(8 / count)


@pytest.mark.parametrize("step", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (2**32, 0, 0), (1, 1, 1)])
def test_neighbours_are_independent(step):
    """Of pairs that differ by a step in seed, position or token: 20 x 20 equally likely cells."""
    seed_step, position_step, token_step = step
    tokens = np.arange(4000, dtype=np.int32)
    seeds, positions = range(50, 150), np.arange(100, dtype=np.int32)
    first = noise(seed_words(*seeds), positions, tokens)
    second = noise(
        seed_words(*(seed + seed_step for seed in seeds)),
        positions + position_step,
        tokens + token_step,
    )
    uniforms = [np.exp(-np.asarray(x, np.float64)).ravel() for x in (first, second)]
    counts = np.histogram2d(*uniforms, bins=20, range=[(0, 1), (0, 1)])[0]
    assert chi_square(counts, uniforms[0].size / 400) < limit(399)


def test_the_smallest_variates_decide_races_and_have_all_their_digits():
    sample = np.concatenate(
        [
            np.asarray(noise(seed_words(seed), np.zeros(1, np.int32), np.arange(VOCAB)))[0]
            for seed in range(20)
        ]
    )
    small = np.sort(sample)[:1000]
    assert len(np.unique(small)) > 990
    assert chi_square(np.histogram(small, bins=10, range=(0, small[-1]))[0], 100) < limit(9)


def test_the_winner_of_a_race_is_drawn_by_its_weight():
    """200,000 draws from 32 weights over six decades: total variation below 0.01."""
    draws, width = 200_000, 32
    weights = np.exp(-0.45 * np.arange(width)).astype(np.float32)
    wins = np.zeros(width)
    for first in range(0, draws, 50_000):
        positions = np.arange(first, first + 50_000, dtype=np.int32)
        race = weights / np.asarray(
            noise(seed_words(*[3] * 50_000), positions, np.arange(width, dtype=np.int32))
        )
        wins += np.bincount(race.argmax(axis=1), minlength=width)
    expected = weights / weights.sum(dtype=np.float64)
    assert abs(wins / draws - expected).sum() / 2 < 0.01
    likely = expected * draws >= 5
    assert chi_square(wins[likely], expected[likely] * draws) < limit(likely.sum() - 1)
