"""Properties of each rotary scaling, from the papers rather than from another implementation."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.errors import UnsupportedModelError
from jaxserve.core.model_config import RopeConfig
from jaxserve.models.rope import frequencies, rotate, rotation

PLAIN = RopeConfig(theta=10_000.0, rotary_dim=64, original_max_position=2048)
BASE = frequencies(PLAIN, 2048)[0]
CONTEXTS = st.integers(1, 1 << 20)
FACTORS = st.floats(1.01, 64.0)


def scaled(kind, **fields):
    return dataclasses.replace(PLAIN, kind=kind, **fields)


def vectors(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def test_default_spans_one_to_the_base():
    """Wavelengths grow geometrically from 2 pi towards 2 pi theta (RoFormer, 3.3)."""
    wavelengths = 2 * math.pi / BASE
    assert wavelengths[0] == 2 * math.pi
    ratios = wavelengths[1:] / wavelengths[:-1]
    np.testing.assert_allclose(ratios, 10_000.0 ** (1 / 32))


@given(CONTEXTS, CONTEXTS, FACTORS)
def test_only_dynamic_and_longrope_depend_on_the_context(one, other, factor):
    for kind in ("default", "linear", "llama3", "yarn"):
        rope = scaled(kind, factor=factor)
        first, second = frequencies(rope, one), frequencies(rope, other)
        np.testing.assert_array_equal(first[0], second[0])
        assert first[1] == second[1]


@given(FACTORS)
def test_linear_squeezes_positions(factor):
    """Position interpolation: position p * factor turns as far as p did (2306.15595)."""
    inverse, magnitude = frequencies(scaled("linear", factor=factor), 2048)
    np.testing.assert_allclose(inverse * factor, BASE)
    assert magnitude == 1.0


@given(st.integers(1, 2048), FACTORS)
def test_dynamic_leaves_the_trained_context_alone(context, factor):
    np.testing.assert_array_equal(frequencies(scaled("dynamic", factor=factor), context)[0], BASE)


@given(st.integers(2049, 1 << 20), FACTORS)
def test_dynamic_stretches_the_slowest_rotation_by_the_ratio(context, factor):
    """NTK-aware: the fastest pair keeps its turn, the slowest is interpolated in full."""
    inverse, _ = frequencies(scaled("dynamic", factor=factor), context)
    assert inverse[0] == BASE[0]
    stretch = factor * context / 2048 - (factor - 1)
    np.testing.assert_allclose(BASE[-1] / inverse[-1], stretch)
    assert (np.diff(BASE / inverse) > 0).all()


@given(FACTORS)
def test_llama3_has_three_bands(factor):
    rope = scaled("llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0)
    inverse, magnitude = frequencies(rope, 1 << 17)
    turns = 2048 * BASE / (2 * math.pi)
    np.testing.assert_array_equal(inverse[turns > 4], BASE[turns > 4])
    np.testing.assert_allclose(inverse[turns < 1], BASE[turns < 1] / factor)
    between = (turns > 1) & (turns < 4)
    assert between.sum() > 2
    assert (inverse[between] < BASE[between]).all()
    assert (inverse[between] > BASE[between] / factor).all()
    assert magnitude == 1.0


@given(FACTORS)
def test_yarn_keeps_fast_rotations_and_interpolates_slow_ones(factor):
    """Pairs that turn over 32 times in the trained context are kept, under once interpolated."""
    inverse, magnitude = frequencies(scaled("yarn", factor=factor), 1 << 17)
    turns = 2048 * BASE / (2 * math.pi)
    # Rounding the bounds to whole dimensions can move each by one.
    np.testing.assert_allclose(inverse[turns > 32 * 1.4], BASE[turns > 32 * 1.4])
    np.testing.assert_allclose(inverse[turns < 1 / 1.4], BASE[turns < 1 / 1.4] / factor)
    shares = BASE / inverse
    assert (np.diff(shares) >= -1e-12).all()
    assert 1 < shares[len(shares) // 2] < factor
    # Equation 22: sqrt(1/t) = 0.1 ln(s) + 1.
    assert magnitude == pytest.approx(0.1 * math.log(factor) + 1)


def test_yarn_magnitude_can_be_given():
    assert frequencies(scaled("yarn", factor=8.0, attention_factor=0.5), 2048)[1] == 0.5
    # DeepSeek's pair of scales cancels when they are equal.
    assert frequencies(scaled("yarn", factor=8.0, mscale=0.7, mscale_all_dim=0.7), 2048)[1] == 1.0
    assert frequencies(scaled("yarn", factor=1.0), 2048)[1] == 1.0


@pytest.mark.parametrize("context, which", [(2048, "short"), (2049, "long")])
def test_longrope_takes_the_factors_of_its_context(context, which):
    lists = {"short": tuple(np.linspace(1, 2, 32)), "long": tuple(np.linspace(1, 40, 32))}
    rope = scaled("longrope", factor=16.0, short_factor=lists["short"], long_factor=lists["long"])
    inverse, magnitude = frequencies(rope, context)
    np.testing.assert_allclose(BASE / inverse, lists[which])
    # LongRoPE, 3.3 of the Phi-3 report: sqrt(1 + ln s / ln L).
    assert magnitude == pytest.approx(math.sqrt(1 + math.log(16) / math.log(2048)))


def test_longrope_needs_a_factor_for_every_pair():
    with pytest.raises(UnsupportedModelError, match=r"needs 32 .* gives 31"):
        frequencies(scaled("longrope", long_factor=(1.0,) * 31), 4096)
    with pytest.raises(UnsupportedModelError, match="gives None"):
        frequencies(scaled("longrope", long_factor=(1.0,) * 32), 1024)


def test_an_unknown_kind_is_named():
    with pytest.raises(UnsupportedModelError, match="'spiral'"):
        frequencies(scaled("spiral"), 2048)


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn"])
def test_scores_depend_on_distance_alone(kind):
    """The point of it all: rotated queries and keys meet as if only their distance were known."""
    rope = scaled(kind, factor=4.0)
    q, k = vectors(1, 1, 64), vectors(2, 1, 64)[1:]

    def rotated(x, position):
        return rotate(x, *rotation(rope, 4096, jnp.asarray([position])))

    def score(query_at, key_at):
        return float((rotated(q, query_at) * rotated(k, key_at)).sum())

    near = score(7, 3)
    assert score(1007, 1003) == pytest.approx(near, abs=1e-3)
    assert abs(score(7, 0) - near) > 0.1


def test_rotation_keeps_lengths_and_magnitude_scales_them():
    x = vectors(5, 3, 64)
    positions = jnp.arange(5) * 100
    lengths = jnp.linalg.norm(x, axis=-1)
    plain = rotate(x, *rotation(PLAIN, 2048, positions))
    np.testing.assert_allclose(jnp.linalg.norm(plain, axis=-1), lengths, rtol=1e-5)
    np.testing.assert_array_equal(plain[0], x[0])
    stretched = rotate(x, *rotation(scaled("yarn", attention_factor=1.5), 2048, positions))
    np.testing.assert_allclose(jnp.linalg.norm(stretched, axis=-1), 1.5 * lengths, rtol=1e-5)


def test_pairs_lie_half_the_rotary_dimensions_apart():
    rope = dataclasses.replace(PLAIN, rotary_dim=8)
    x = jnp.zeros((1, 1, 12)).at[..., 1].set(1.0)
    turned = rotate(x, *rotation(rope, 2048, jnp.asarray([3])))[0, 0]
    angle = 3 * 10_000.0 ** (-2 / 8)
    expected = np.zeros(12)
    expected[[1, 5]] = math.cos(angle), math.sin(angle)
    np.testing.assert_allclose(turned, expected, atol=1e-6)


def test_dimensions_beyond_rotary_dim_stay():
    rope = dataclasses.replace(PLAIN, rotary_dim=8)
    x = vectors(4, 1, 12)
    turned = rotate(x, *rotation(rope, 2048, jnp.arange(1, 5)))
    np.testing.assert_array_equal(turned[..., 8:], x[..., 8:])
    assert (jnp.abs(turned - x)[..., :8].max(axis=-1) > 0.1).all()
