"""Tiles and halves of a step: the tokens and rows that each has, and what is computed of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.runtime.programs.forward.dual_batch import halves, rows_of_half
from jaxserve.runtime.programs.layout.tiles import batch_of_tile, num_real_tokens, scan_tiles
from pallas_kernels.paged_attention import RaggedBatch

TILE = 4


@st.composite
def batches(draw: st.DrawFn) -> tuple[RaggedBatch, int, int]:
    """A step as StepLayout packs it: decodes, padding among them, then chunks and padding; with
    the number of its decode rows, and of its tokens."""
    bucket = draw(st.integers(0, 6))
    decodes = draw(st.integers(0, bucket))
    lengths = draw(st.lists(st.integers(1, 9), max_size=4))
    if not bucket + len(lengths):
        lengths = [1]
    padding = draw(st.integers(0, 3))
    total = bucket + sum(lengths)
    starts = [*range(bucket), *(bucket + sum(lengths[:i]) for i in range(len(lengths)))]
    context = [draw(st.integers(1, 50)) for _ in range(decodes)] + [0] * (bucket - decodes)
    context += [length + draw(st.integers(0, 50)) for length in lengths]
    rows = len(starts) + padding
    fields = (
        [[row] for row in range(rows)],
        context + [0] * padding,
        starts + [total] * padding,
        [1] * bucket + lengths + [0] * padding,
    )
    return RaggedBatch(*(np.asarray(field, np.int32) for field in fields)), bucket, total


def tokens_of(batch: RaggedBatch, first: int = 0) -> dict[int, tuple[int, int]]:
    """Row and position of each real token of a batch that begins at the token `first`."""
    return {
        int(first + start + place): (int(table[0]), int(context - length + place))
        for table, context, start, length in zip(*batch)
        for place in range(length if context else 0)
    }


@given(batches())
@settings(max_examples=100, deadline=None)
def test_tiles_hold_every_token_once_with_its_row_and_position(case):
    batch, _, total = case
    expected, found = tokens_of(batch), {}
    for first in range(0, total, TILE):
        tile = jax.tree.map(np.asarray, batch_of_tile(batch, jnp.int32(first), TILE))
        assert (np.diff(tile.starts) >= 0).all() and (tile.lengths >= 0).all()
        own = tokens_of(tile, first)
        assert not own.keys() & found
        found |= own
    assert found == expected
    assert num_real_tokens(batch) == max(expected, default=-1) + 1


@given(batches())
@settings(max_examples=50, deadline=None)
def test_halves_hold_every_token_once_with_its_row_and_position(case):
    batch, bucket, total = case
    if total < 2:
        return
    found = {}
    for part in halves(total):
        half, decodes = rows_of_half(batch, part, bucket)
        half = jax.tree.map(np.asarray, half)
        assert (np.diff(half.starts) >= 0).all() and (half.lengths >= 0).all()
        assert (half.starts[:decodes] == np.arange(decodes)).all()
        assert (half.lengths[:decodes] == 1).all()
        own = tokens_of(half, part.start)
        assert all(part.start <= token < part.stop for token in own)
        found |= own
    assert found == tokens_of(batch)


def test_halves_of_many_tokens_fill_tiles():
    assert [halves(count)[0].stop for count in (2, 3, 255, 300, 2112)] == [1, 1, 127, 128, 1024]


@pytest.mark.parametrize("count", [0, 1, 4, 5, 12])
def test_tiles_are_done_in_order_and_those_without_real_entries_not_at_all(count):
    total = 12
    x, tokens = jnp.arange(2.0 * total).reshape(total, 2), jnp.arange(total)

    def function(carry, arrays):
        x, tokens = arrays
        assert x.shape == (TILE, 2) and tokens.shape == (TILE,)
        return carry * 3 + jnp.min(tokens) + 1, x * x

    carry, squares = jax.jit(
        lambda x, tokens, count: scan_tiles(function, jnp.int32(0), (x, tokens), TILE, count)
    )(x, tokens, count)
    expected, tiles = 0, -(-count // TILE)
    for tile in range(tiles):
        expected = expected * 3 + tile * TILE + 1
    assert carry == expected
    done = np.arange(total) < tiles * TILE
    np.testing.assert_array_equal(squares, np.where(done[:, None], x * x, 0))


def test_without_a_tile_everything_is_one():
    _, (shape,) = scan_tiles(lambda carry, x: (carry, (x.shape,)), (), jnp.zeros((3, 7)), None, 5)
    assert shape == (3, 7)
