"""Heads on ranks that do not divide them: exact, balanced, no larger than need be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding_rules import HeadLayout, pad_to


@st.composite
def layouts(draw) -> HeadLayout:
    kv_heads = draw(st.integers(1, 24))
    queries_per_kv = draw(st.integers(1, 16))
    return HeadLayout(kv_heads * queries_per_kv, kv_heads, draw(st.integers(1, 40)))


@given(layouts())
def test_every_query_stands_once_and_with_its_own_kv_head(layout):
    queries, keys = layout.queries(), layout.keys()
    assert queries.shape == (layout.kv_heads, layout.group)
    assert keys.shape == (layout.kv_heads,)
    assert layout.kv_heads % layout.tensor == 0
    there = queries[queries >= 0]
    assert sorted(there) == list(range(layout.num_heads))
    own = there // (layout.num_heads // layout.num_kv_heads)
    assert (own == np.broadcast_to(keys[:, None], queries.shape)[queries >= 0]).all()


@given(layouts())
def test_kv_heads_are_copied_equally_and_never_within_a_rank(layout):
    keys = layout.keys()
    for head in range(layout.num_kv_heads):
        assert (keys == head).sum() == layout.copies
    for rank in keys.reshape(layout.tensor, -1):
        real = rank[rank >= 0]
        assert len(set(real)) == len(real)
    assert ((layout.queries() >= 0).any(axis=1) == (keys >= 0)).all(), "a copy that nothing reads"


@given(layouts())
def test_a_rank_holds_as_little_as_it_can(layout):
    """Against a search over all layouts of equal groups."""
    per_kv = layout.num_heads // layout.num_kv_heads
    found = min(
        (kv_heads, kv_heads * group)
        for group in range(1, per_kv + 1)
        for kv_heads in [pad_to(layout.num_kv_heads * -(-per_kv // group), layout.tensor)]
    )
    assert (layout.kv_heads, layout.kv_heads * layout.group) == found


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 16))
def test_a_degree_that_divides_changes_nothing(tensor, kv_per_rank, queries_per_kv):
    kv_heads = tensor * kv_per_rank
    layout = HeadLayout(kv_heads * queries_per_kv, kv_heads, tensor)
    assert (layout.kv_heads, layout.copies) == (kv_heads, 1)
    assert layout.queries().ravel().tolist() == list(range(kv_heads * queries_per_kv))
    assert layout.keys().tolist() == list(range(kv_heads))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tensor", "kv_heads_after", "group", "copies"),
    [
        (9, 3, 2, 4, 3, 1),
        (9, 3, 4, 4, 3, 1),
        (9, 3, 8, 8, 2, 2),
        (32, 8, 8, 8, 4, 1),
        (32, 8, 16, 16, 2, 2),
        (4, 1, 8, 8, 1, 4),
        (40, 10, 4, 12, 4, 1),
        (2, 2, 8, 8, 1, 1),
    ],
)
def test_known_layouts(heads, kv_heads, tensor, kv_heads_after, group, copies):
    layout = HeadLayout(heads, kv_heads, tensor)
    assert (layout.kv_heads, layout.group, layout.copies) == (kv_heads_after, group, copies)


def test_attention_over_the_layout_is_the_models_own():
    """Heads put where the layout says, and zeros, give the same sum over heads."""
    rng = np.random.default_rng(0)
    layout, dim, tokens, hidden = HeadLayout(9, 3, 8), 4, 5, 6
    q, k = rng.normal(size=(9, tokens, dim)), rng.normal(size=(3, tokens, dim))
    v, out = rng.normal(size=(3, tokens, dim)), rng.normal(size=(9, dim, hidden))

    def attention(q, k, v, out):
        """q [kv_heads, group, ...], out [kv_heads, group, ...] -> [tokens, hidden]"""
        scores = np.exp(np.einsum("hgqd,hkd->hgqk", q, k))
        mixed = np.einsum("hgqk,hkd->hgqd", scores / scores.sum(-1, keepdims=True), v)
        return np.einsum("hgqd,hgde->qe", mixed, out)

    def laid_out(array, index):
        zero = np.zeros((1, *array.shape[1:]))
        return np.concatenate([array, zero])[index]

    expected = attention(q.reshape(3, 3, tokens, dim), k, v, out.reshape(3, 3, dim, hidden))
    queries, keys = layout.queries(), layout.keys()
    got = attention(
        laid_out(q, queries), laid_out(k, keys), laid_out(v, keys), laid_out(out, queries)
    )
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_heads_that_make_no_groups_are_refused():
    with pytest.raises(ValueError, match="9 query heads do not divide by 2 KV heads"):
        HeadLayout(9, 2, 4)


def test_a_degree_below_one_is_refused():
    with pytest.raises(ValueError, match="degree is 0"):
        HeadLayout(9, 3, 0)


@given(st.integers(0, 10**6), st.integers(1, 10**4))
def test_padding(size, multiple):
    padded = pad_to(size, multiple)
    assert padded % multiple == 0
    assert 0 <= padded - size < multiple
