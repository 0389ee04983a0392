"""Who has which positions, who sees which keys, and what should travel. Needs no devices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.ring_attention import (
    Work,
    choose_scheme,
    contiguous,
    pairs,
    round_robin,
    zigzag,
)

ranks_of = st.sampled_from([1, 2, 3, 4, 8])
lengths_of = st.lists(st.integers(0, 200), min_size=1, max_size=4).map(np.int32)
dealers = st.sampled_from(
    [contiguous, zigzag, *(lambda _, ranks, size=size: round_robin(size, ranks) for size in (1, 7))]
)


def whole(layout, lengths, shard, causal=True, window=None):
    """The work of whole sequences, keys sharded as queries are."""
    return Work(layout, layout, lengths, lengths, shard, causal, window)


@settings(max_examples=100, deadline=None)
@given(lengths_of, ranks_of, dealers)
def test_every_position_lies_on_one_rank_and_each_rank_has_its_own_in_order(
    lengths, ranks, shard_of
):
    layout, shard = shard_of(lengths, ranks), 250
    for row, length in enumerate(lengths):
        held = []
        for rank in range(ranks):
            positions = layout.position(rank, np.arange(shard)[None])
            positions = np.broadcast_to(positions, (len(lengths), shard))[row]
            assert (np.diff(positions) > 0).all()
            own = positions[positions < length]
            np.testing.assert_array_equal(own, positions[: len(own)])
            ends = np.arange(length + 1)[None].repeat(len(lengths), 0)
            np.testing.assert_array_equal(
                layout.before(rank, ends)[row], np.searchsorted(own, ends[row])
            )
            np.testing.assert_array_equal(
                np.broadcast_to(layout.rank(own[None]), (len(lengths), len(own)))[row], rank
            )
            held.extend(own)
        np.testing.assert_array_equal(np.sort(held), np.arange(length))


@settings(max_examples=50, deadline=None)
@given(lengths_of, ranks_of, dealers)
def test_a_permutation_and_its_inverse(lengths, ranks, shard_of):
    layout, shard = shard_of(lengths, ranks), 250
    order = np.broadcast_to(layout.order(shard), (len(lengths), ranks * shard))
    for row, length in enumerate(lengths):
        positions = np.arange(length)[None].repeat(len(lengths), 0)
        places = layout.places(positions, shard)[row]
        np.testing.assert_array_equal(order[row][places], np.arange(length))
        assert len(np.unique(places)) == length


def test_zigzag_by_hand():
    layout = zigzag(np.int32([16, 13]), 4)  # blocks of 2, the last of the second row half empty
    np.testing.assert_array_equal(
        layout.order(4)[0], [0, 1, 14, 15, 2, 3, 12, 13, 4, 5, 10, 11, 6, 7, 8, 9]
    )
    np.testing.assert_array_equal(
        layout.rank(np.arange(16)[None])[0], [int(rank) for rank in "0011223333221100"]
    )


def test_zigzag_by_hand_of_rows_that_differ():
    """Each by its own length: what lies beyond it is padding, at the end of a rank's share."""
    layout = zigzag(np.int32([8, 5]), 2)
    np.testing.assert_array_equal(layout.order(4)[0], [0, 1, 6, 7, 2, 3, 4, 5])
    assert layout.block.tolist() == [[2], [2]]
    np.testing.assert_array_equal(layout.before(0, np.int32([[8], [5]]))[:, 0], [4, 2])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=3).map(np.int32),
    st.sampled_from([1, 2, 4]),
    dealers,
    st.sampled_from([(True, None), (True, 1), (True, 9), (False, None)]),
    st.data(),
)
def test_what_ranks_see_of_each_other_is_what_the_mask_says(lengths, ranks, shard_of, mask, data):
    """Of new tokens sharded one way and of all the keys sharded a page at a time."""
    cached = np.int32([data.draw(st.integers(0, 40)) for _ in lengths])
    causal, window = mask
    queries, keys = shard_of(lengths, ranks), round_robin(4, ranks)
    shard = 70
    work = Work(queries, keys, cached + lengths, lengths, shard, causal, window)
    for owner, source in np.ndindex(ranks, ranks):
        since, until = work.visible(owner, source)
        new = np.broadcast_to(queries.position(owner, np.arange(shard)[None]), since.shape)
        theirs = keys.position(source, np.arange(shard))
        for row, length in enumerate(lengths):
            inside = new[row] < length
            own = inside.sum()
            assert (np.diff(since[row, :own]) >= 0).all() and (np.diff(until[row, :own]) >= 0).all()
            behind = (cached[row] + new[row])[:, None] - theirs
            seen = inside[:, None] & (theirs < cached[row] + length)
            if causal:
                seen &= behind >= 0
            if window is not None:
                seen &= behind < window
            index = np.arange(shard)
            ranges = (index >= since[row][:, None]) & (index < until[row][:, None])
            np.testing.assert_array_equal(ranges, seen)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_zigzag_gives_every_rank_the_same_work_at_every_step(ranks):
    length = np.int32([16 * ranks])
    even = pairs(whole(zigzag(length, ranks), length, 16))
    for step in even:
        assert set(step) == {step[0]}
    assert even.sum() == 16 * ranks * (16 * ranks + 1) // 2


@pytest.mark.parametrize(("ranks", "expected"), [(2, 1.48), (4, 1.74), (8, 1.87)])
def test_contiguous_shares_leave_the_last_rank_with_nearly_twice_the_mean(ranks, expected):
    length = np.int32([16 * ranks])
    of_rank = pairs(whole(contiguous(length, ranks), length, 16)).sum(0)
    assert of_rank.max() / of_rank.mean() == pytest.approx(expected, abs=0.005)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 500), st.sampled_from([2, 4, 8]))
def test_zigzag_of_any_length_is_even_but_for_the_last_block(length, ranks):
    """Who has less of the last block has fewer queries, of which none sees more than all."""
    lengths = np.int32([length])
    layout = zigzag(lengths, ranks)
    block = int(layout.block[0, 0])
    of_rank = pairs(whole(layout, lengths, 2 * block)).sum(0)
    missing = 2 * ranks * block - length
    assert of_rank.max() - of_rank.min() <= missing * 2 * ranks * block


def test_pages_in_turn_are_even_once_there_are_many():
    ranks, lengths = 8, np.int32([8 * 128 * 32])
    steps = pairs(whole(round_robin(128, ranks), lengths, 128 * 32))
    assert steps.max(1).sum() / steps.sum(0).mean() < 1.04
    full = whole(round_robin(128, ranks), lengths, 128 * 32, causal=False)
    assert len(np.unique(pairs(full))) == 1


LLAMA_405B = {"query_heads": 128, "kv_heads": 8, "element_bytes": 2}
H100_AND_HALF_A_400G_LINK = {"flops_per_s": 989e12, "link_bytes_per_s": 25e9}


def chosen(new_tokens, cached_tokens, ranks=4, model=LLAMA_405B, machine=H100_AND_HALF_A_400G_LINK):
    return choose_scheme(
        new_tokens=new_tokens, cached_tokens=cached_tokens, ranks=ranks, **model, **machine
    )


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("tokens", [1, 100, 131_072])
def test_a_full_prefill_passes_keys_and_values(ranks, tokens):
    assert chosen(tokens, 0, ranks) == "pass_kv"


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("cached", [1_000, 131_072, 10_000_000])
def test_decoding_passes_queries(ranks, cached):
    assert chosen(1, cached, ranks) == "pass_q"


def test_the_change_is_near_five_percent_of_new_tokens():
    """Llama 3 405B, 128K in all, 4 ranks, as 2411.01783 measured. By hand: with T + P = L,
    T / L >= 2/16 - 4 T W / (N C e) where T >= L / 8 / (1 + 4 L W / (N C e)) = 0.0471 L."""
    total = 131_072
    assert chosen(int(0.0469 * total), total - int(0.0469 * total)) == "pass_q"
    assert chosen(int(0.0472 * total), total - int(0.0472 * total)) == "pass_kv"


def test_a_long_enough_chunk_hides_keys_and_values_whatever_came_before():
    """By hand: N C h e / (2 W) = 4 * 989e12 / 16 * 2 / 50e9 = 9,890."""
    assert chosen(9_890, 10**9) == "pass_kv"
    assert chosen(9_889, 10**9) == "pass_q"


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 200_000),
    st.integers(0, 2_000_000),
    st.sampled_from([2, 4, 8, 16]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.floats(2_000, 50_000),
)
def test_the_rule_picks_what_takes_less_time(new, cached, ranks, group, flops_per_byte):
    """Of the sends that are not hidden, in bytes of the link, wherever pass-Q's ring is hidden."""
    total, features, size = new + cached, 128, 2
    compute = 4 * new * total * features / ranks**2 / flops_per_byte
    queries = new / ranks * features * size
    keys = 2 * total / ranks * features / group * size
    if queries > compute:
        return
    shown_kv = (ranks - 1) * max(0, keys - compute)
    shown_q = (ranks - 1) * queries
    if abs(shown_kv - shown_q) < 1e-6 * shown_q:
        return
    model = {"query_heads": group, "kv_heads": 1, "element_bytes": size}
    machine = {"flops_per_s": flops_per_byte, "link_bytes_per_s": 1.0}
    expected = "pass_kv" if shown_kv < shown_q else "pass_q"
    assert chosen(new, cached, ranks, model, machine) == expected
