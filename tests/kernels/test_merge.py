"""Partial attentions, merged, are attention over all the keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.merge import merge, merge_over, merge_sinks, merge_two
from pallas_kernels.merge.reference import merge as reference

PARTS, TOKENS, HEADS, DIM = 4, 3, 2, 8
KEYS = 12

seeds = st.integers(0, 2**32 - 1)
emptiness = st.lists(
    st.lists(st.booleans(), min_size=TOKENS * HEADS, max_size=TOKENS * HEADS),
    min_size=PARTS,
    max_size=PARTS,
).map(lambda empty: np.reshape(empty, (PARTS, TOKENS, HEADS)))
"""Which partials of which queries are empty; often enough all or none."""

jitted, jitted_two = jax.jit(merge), jax.jit(merge_two)


def attention(q, k, v):
    """Out [tokens, heads, dim] and lse of q [tokens, heads, dim] over k, v [keys, dim], float64."""
    scores = q @ k.T
    if not len(k):
        return np.zeros(q.shape), np.full(q.shape[:-1], -np.inf)
    peak = scores.max(-1, keepdims=True)
    weights = np.exp(scores - peak)
    total = weights.sum(-1, keepdims=True)
    return weights / total @ v, (peak + np.log(total))[..., 0]


def partials(seed, empty=None, spread=30.0):
    """Random outs and lses; where empty, lse is -inf and out NaN, which is never to be seen."""
    rng = np.random.default_rng(seed)
    outs = rng.normal(size=(PARTS, TOKENS, HEADS, DIM)).astype(np.float32)
    lses = (spread * rng.normal(size=(PARTS, TOKENS, HEADS))).astype(np.float32)
    if empty is not None:
        outs[empty], lses[empty] = np.nan, -np.inf
    return outs, lses


def assert_close(actual, expected, tolerance=1e-5):
    for one, other in zip(actual, expected):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def assert_equal(actual, expected):
    for one, other in zip(actual, expected):
        np.testing.assert_array_equal(one, other)


@settings(max_examples=50, deadline=None)
@given(seeds, st.lists(st.integers(0, PARTS - 1), min_size=KEYS, max_size=KEYS).map(np.array))
def test_any_split_of_the_keys_merges_to_attention_over_all(seed, part_of_key):
    rng = np.random.default_rng(seed)
    q = 3 * rng.normal(size=(TOKENS, HEADS, DIM))
    k, v = rng.normal(size=(2, KEYS, DIM))
    parts = [attention(q, k[part_of_key == part], v[part_of_key == part]) for part in range(PARTS)]
    outs, lses = (np.stack(arrays).astype(np.float32) for arrays in zip(*parts))
    whole = attention(q, k, v)
    assert_close(reference(outs, lses), whole, 1e-4)
    assert_close(jitted(outs, lses), whole, 1e-4)


@settings(max_examples=50, deadline=None)
@given(seeds, emptiness)
def test_against_the_reference(seed, empty):
    outs, lses = partials(seed, empty)
    expected = reference(outs, lses)
    assert not np.isnan(expected[0]).any()
    assert_close(jitted(outs, lses), expected)


@settings(max_examples=30, deadline=None)
@given(seeds, emptiness, st.permutations(range(PARTS)))
def test_the_order_of_partials_does_not_matter(seed, empty, order):
    outs, lses = partials(seed, empty)
    assert_close(jitted(outs[order], lses[order]), jitted(outs, lses))


@settings(max_examples=30, deadline=None)
@given(seeds, emptiness)
def test_merging_two_by_two_is_commutative_and_associative(seed, empty):
    a, b, c, d = zip(*partials(seed, empty))
    assert_close(jitted_two(*a, *b), jitted_two(*b, *a))
    left = jitted_two(*jitted_two(*jitted_two(*a, *b), *c), *d)
    balanced = jitted_two(*jitted_two(*a, *b), *jitted_two(*c, *d))
    assert_close(left, balanced)
    assert_close(left, reference(*partials(seed, empty)))


@settings(max_examples=30, deadline=None)
@given(seeds, st.integers(0, PARTS - 1))
def test_the_only_partial_that_is_not_empty_is_the_result_to_the_last_bit(seed, only):
    outs, lses = partials(seed)
    empty = np.arange(PARTS) != only
    outs[empty], lses[empty] = np.nan, -np.inf
    assert_equal(jitted(outs, lses), (outs[only], lses[only]))
    other = (only + 1) % PARTS
    pair = (outs[only], lses[only], outs[other], lses[other])
    assert_equal(jitted_two(*pair), (outs[only], lses[only]))


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_nothing_but_empty_partials_make_an_empty_one(parts):
    outs = jnp.full((parts, TOKENS, HEADS, DIM), jnp.nan)
    lses = jnp.full((parts, TOKENS, HEADS), -jnp.inf)
    nothing = np.zeros((TOKENS, HEADS, DIM)), np.full((TOKENS, HEADS), -np.inf)
    assert_equal(merge(outs, lses), nothing)
    if parts:
        assert_equal(merge_two(outs[0], lses[0], outs[-1], lses[-1]), nothing)


def test_scores_beyond_what_exp_can_hold():
    outs, lses = partials(0, spread=1e4)
    assert_close(jitted(outs, lses), reference(outs, lses))
    assert_close(jitted(outs, lses + 3e38), reference(outs, lses + np.float32(3e38)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_rounded_once(dtype):
    outs, lses = partials(0, spread=1.0)
    outs = jnp.asarray(outs, dtype)
    out, lse = jitted(outs, lses)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    expected_out, expected_lse = reference(outs, lses)
    # Half of dtype's last place, and what float32 sums may add to it.
    tolerance = 0.51 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected_out, rtol=tolerance, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)


def test_a_running_result_in_float32_stays_so():
    outs, lses = partials(0, spread=1.0)
    running, added = outs[0], jnp.asarray(outs[1], jnp.bfloat16)
    out, lse = jitted_two(running, lses[0], added, lses[1])
    assert out.dtype == jnp.float32
    expected = reference([running, np.asarray(added, np.float32)], lses[:2])
    assert_close((out, lse), expected)


def test_a_sink_is_a_partial():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=shape) for shape in ((TOKENS, HEADS, DIM), (5, DIM), (5, DIM)))
    out, lse = (np.float32(array) for array in attention(q, k, v))
    sinks = np.broadcast_to(np.float32([0.3, -1.0]), lse.shape)
    weights = np.exp(q @ k.T)
    total = weights.sum(-1) + np.exp(sinks)
    merged = jitted_two(out, lse, np.zeros_like(out), sinks)
    expected = weights @ v / total[..., None], np.log(total)
    assert_close(merged, expected)
    assert_close(merge_sinks(out, lse, sinks[0]), expected)
    nothing = np.zeros_like(out), np.full_like(lse, -np.inf)
    assert_equal(merge_sinks(*nothing, sinks[0]), nothing)


@settings(max_examples=10, deadline=None)
@given(seeds, emptiness)
def test_over_a_mesh_axis_of_one_stacked_device(seed, empty):
    """`vmap` names an axis as a mesh does, with as many members as one likes on one device."""
    outs, lses = partials(seed, empty)
    everywhere = jax.vmap(lambda *one: merge_over("seq", *one), axis_name="seq")(outs, lses)
    expected = reference(outs, lses)
    for member in zip(*everywhere):
        assert_close(member, expected)


def test_over_the_axis_of_a_mesh():
    mesh = Mesh(np.array(jax.devices()), ("seq",))
    outs, lses = (np.repeat(array[:1], mesh.size, 0) for array in partials(0))

    def local(out, lse):
        return merge_over("seq", out[0], lse[0])

    mapped = jax.shard_map(local, mesh=mesh, in_specs=P("seq"), out_specs=P())
    assert_close(jax.jit(mapped)(outs, lses), reference(outs, lses))


def test_what_does_not_belong_together_is_refused():
    outs, lses = partials(0)
    with pytest.raises(ValueError, match=r"outs has shape \(4, 3, 2, 8\) and lses \(4, 2, 3\)"):
        merge(outs, lses.swapaxes(1, 2))
    with pytest.raises(ValueError, match="lses is bfloat16; log-sum-exps are float32"):
        merge(outs, jnp.asarray(lses, jnp.bfloat16))
    with pytest.raises(ValueError, match="outs is int32"):
        merge(outs.astype(np.int32), lses)
    with pytest.raises(ValueError, match="a stack of partials"):
        merge(outs[0, 0, 0], lses[0, 0, 0])
    with pytest.raises(ValueError, match=r"\(3, 2, 8\) and \(2, 2, 8\) cannot be merged"):
        merge_two(outs[0], lses[0], outs[1, :2], lses[1, :2])
