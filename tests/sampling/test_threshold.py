from __future__ import annotations

import jax
import numpy as np
import pytest
import sampling_reference as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sampling import threshold

ROWS = 3
floor_of = jax.jit(threshold.weight_floor)
searched_floor = jax.jit(threshold._searched_floor)


def device_kept(weights, top_k, top_p, min_p, on_gpus=False):
    limits = np.asarray(top_k, np.int32), np.asarray(top_p, np.float32)
    least = np.asarray(min_p, np.float32)
    if on_gpus:
        floor = searched_floor(weights, *limits, np.maximum(least, threshold._SMALLEST))
    else:
        floor = floor_of(weights, *limits, least)
    return weights >= np.asarray(floor)[:, None]


# 1,024 weights are searched directly; 8,192 go through candidates, and past them when too flat.
@pytest.mark.parametrize("width", [1024, 8192])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_kept_sets_equal_sorting(width, data):
    # Weights and p in few binary digits: their sums and products are exact, and ties abound.
    seed = data.draw(st.integers(0, 2**32 - 1))
    levels = data.draw(st.sampled_from([1, 2, 7, 64, 256]))
    support = data.draw(st.sampled_from([1, 5, 300, width]))
    rng = np.random.default_rng(seed)
    weights = np.zeros((ROWS, width), np.float32)
    for row in weights:
        places = rng.choice(width, support, replace=False)
        row[places] = rng.integers(0, levels + 1, support) / np.float32(256)
        row[places[0]] = 1.0
    top_k = data.draw(
        st.lists(st.sampled_from([0, 1, 2, 50, 63, 64, 65, 900, 10**6]), min_size=3, max_size=3)
    )
    top_p = data.draw(
        st.lists(st.sampled_from([1.0, 2**-20, 0.25, 0.5, 0.9375]), min_size=3, max_size=3)
    )
    min_p = data.draw(st.lists(st.sampled_from([0.0, 1 / 256, 0.5, 1.0]), min_size=3, max_size=3))
    expected = [reference.kept(row, k, p, m) for row, k, p, m in zip(weights, top_k, top_p, min_p)]
    for on_gpus in (False, True):
        kept = device_kept(weights, top_k, top_p, min_p, on_gpus)
        np.testing.assert_array_equal(kept, expected)


@pytest.mark.parametrize("scale", [0.1, 2.0, 8.0])
def test_top_k_of_distinct_weights_keeps_exactly_k(scale):
    logits = np.random.default_rng(1).normal(size=(ROWS, 8192)).astype(np.float32) * scale
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    # Rounding makes a few ties among thousands of weights; only sorting may say how many.
    for top_k in (1, 7, 63, 64, 1000):
        expected = [reference.kept(row, top_k) for row in weights]
        actual = device_kept(weights, [top_k] * ROWS, [1.0] * ROWS, [0.0] * ROWS)
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("on_gpus", [False, True])
@pytest.mark.parametrize("scale", [0.1, 2.0, 8.0])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999])
def test_nucleus_is_the_smallest_heavy_enough(scale, top_p, on_gpus):
    logits = np.random.default_rng(2).normal(size=(ROWS, 8192)).astype(np.float32) * scale
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    actual = device_kept(weights, [0] * ROWS, [top_p] * ROWS, [0.0] * ROWS, on_gpus)
    rounding = 1e-5 if on_gpus else 1e-6  # Of a sum in the order of a compiler, or in pairs.
    for row, keep in zip(weights.astype(np.float64), actual):
        target = np.float32(top_p) * row.sum()
        assert row[keep].sum() >= target * (1 - rounding)
        assert row[keep].sum() - row[keep].min() < target * (1 + rounding)
        assert row[keep].min() > row[~keep].max(initial=0)
