from __future__ import annotations

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sampling.draw import _pick, inverse_cdf, keyed_uniforms

WIDTH = 4096
draw = jax.jit(inverse_cdf)
LARGEST_UNIFORM = np.float32(1) - np.float32(2**-24)


@given(
    seed=st.integers(0, 2**32 - 1),
    support=st.sampled_from([1, 2, 40, WIDTH]),
    floor=st.sampled_from([1e-30, 0.25, 1.0]),
    uniform=st.sampled_from([0.0, 1e-38, 0.25, 0.5, 0.75, float(LARGEST_UNIFORM)]),
)
@settings(max_examples=60, deadline=None)
def test_only_kept_tokens_are_drawn_at_any_uniform(seed, support, floor, uniform):
    rng = np.random.default_rng(seed)
    weights = np.zeros((2, WIDTH), np.float32)
    for row in weights:
        places = rng.choice(WIDTH, support, replace=False)
        row[places] = rng.random(support, np.float32) ** 9
        row[places[0]] = 1.0
    tokens, _ = draw(weights, np.full(2, floor, np.float32), np.full(2, uniform, np.float32))
    for row, token in zip(weights, np.asarray(tokens)):
        keep = row >= np.float32(floor)
        assert keep[token]
        cumulative = np.cumsum(np.where(keep, row, 0), dtype=np.float64)
        target = uniform * cumulative[-1]
        slack = 1e-5 * cumulative[-1]
        assert cumulative[token] >= target - slack
        assert cumulative[token] - row[token] <= target + slack
        if uniform == 0.0:
            assert token == np.flatnonzero(keep)[0]


def test_sums_that_grow_at_a_zero_weight_or_end_early_do_not_mislead():
    weights = np.array([[0.0, 1.0, 0.0, 1.0, 0.0]] * 3, np.float32)
    cumulative = np.array([[0.0, 1.0, 1.5, 1.75, 1.75]] * 3, np.float32)
    index, before = _pick(weights, cumulative, np.array([-0.5, 1.25, 1.75], np.float32))
    assert index.tolist() == [1, 3, 3]
    assert before.tolist() == [0.0, 1.5, 1.5]


def test_nothing_to_draw_has_no_mass():
    weights = np.zeros((2, WIDTH), np.float32)
    weights[1] = np.nan
    _, mass = draw(weights, np.full(2, 1e-30, np.float32), np.zeros(2, np.float32))
    assert not (np.asarray(mass) > 0).any()


def test_uniforms_depend_on_seed_and_position_alone():
    seeds = np.array([[0, 1], [0, 2], [1, 1], [0, 1], [2**32 - 1, 2**32 - 1]], np.uint32)
    positions = np.array([0, 0, 0, 1, 7], np.int32)
    together = np.asarray(keyed_uniforms(seeds, positions))
    alone = [float(keyed_uniforms(seeds[i : i + 1], positions[i : i + 1])[0]) for i in range(5)]
    assert together.tolist() == alone
    assert len(set(alone)) == 5
    key = jax.random.wrap_key_data(np.array([0, 1], np.uint32), impl="threefry2x32")
    assert alone[3] == float(jax.random.uniform(jax.random.fold_in(key, 1)))


def test_uniforms_are_uniform():
    seeds = np.zeros((20_000, 2), np.uint32)
    seeds[:, 1] = 5
    uniforms = np.asarray(keyed_uniforms(seeds, np.arange(20_000, dtype=np.int32)))
    counts = np.histogram(uniforms, bins=50, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 49 + 4 * np.sqrt(2 * 49)
    assert uniforms.min() >= 0 and uniforms.max() < 1
