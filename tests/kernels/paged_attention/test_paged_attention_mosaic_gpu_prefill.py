"""The Hopper prefill kernel, interpreted on the host with races detected, against float64 loops.

The interpreter compiles each simulated warpgroup in every call, so there are few calls, each
with rows of many kinds. It proves paging, masks, blocks, barriers and the reuse of buffers. It does
not prove how operands lie in registers and shared memory.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_paged_attention import Case, scaled

from pallas_kernels.compat import gpu as compat
from pallas_kernels.paged_attention import RaggedBatch, Visible, masks, reference
from pallas_kernels.paged_attention.gpu.prefill import paged_prefill
from pallas_kernels.paged_attention.gpu.prefill_work import Block, Work, work_list

SCALE = 0.3


def case_of(chunks, dtype=jnp.bfloat16, stored=None, **kind):
    """A batch of chunks in half precision, with pages of dtype `stored`; NaNs wherever nothing was
    written, or in integers nonsense."""
    case = Case([], chunks, **kind)
    stored = jnp.dtype(stored or dtype)
    case.q = np.asarray(jnp.asarray(case.q, dtype))
    pages = case.pages
    if stored == jnp.int8:
        pages = jax.tree.map(lambda array: np.where(np.isnan(array), 127, array * 10), pages)
    case.pages = jax.tree.map(lambda array: np.asarray(jnp.asarray(array).astype(stored)), pages)
    return case


def causal(case, window=None):
    visible = masks.causal(case.batch, len(case.q), 0, window, None)
    return Visible(*map(np.asarray, visible))


def prefill(case, visible, num_sms=1, scale=SCALE, soft_cap=None):
    """Interpreted."""

    def run(q, pages, batch, visible):
        return paged_prefill(
            q,
            pages,
            batch,
            visible,
            scale=scale,
            soft_cap=soft_cap,
            num_sms=num_sms,
            interpret=interpreter,
        )

    with compat.gpu_interpreter(detect_races=True) as interpreter:
        arguments = jax.tree.map(jnp.asarray, (case.q, case.pages, case.batch, visible))
        out, lse = jax.jit(run)(*arguments)
        return np.asarray(out), np.asarray(lse)


def check(case, visible, num_sms=1, scale=SCALE, soft_cap=None):
    """Wrong by no more than rounding the weights to the dtype explains; 0 where nothing is seen."""
    out, lse = prefill(case, visible, num_sms, scale, soft_cap)
    assert out.dtype == case.q.dtype and lse.dtype == np.float32
    expected_out, expected_lse = reference.attend(
        case.q, case.pages, case.batch, visible, num_decodes=0, scale=scale, soft_cap=soft_cap
    )
    assert not np.isnan(expected_out).any()
    tolerance = 4 * float(jnp.finfo(case.q.dtype).eps) * max(1, np.abs(expected_out).max())
    np.testing.assert_allclose(out.astype(np.float64), expected_out, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)
    nothing = expected_lse == -np.inf
    np.testing.assert_array_equal(out[nothing].astype(np.float32), 0)
    np.testing.assert_array_equal(lse[nothing], -np.inf)


@pytest.mark.interpreted
class TestInterpreted:
    @pytest.mark.oldest_jax
    def test_rows_that_share_blocks_of_tokens(self):
        """And of many lengths: of one token, of several blocks, and with padding tokens after."""
        chunks = [(140, 40), (3, 3), (129, 1), (200, 30)]
        case = case_of(chunks, page_size=64, heads=(4, 1), dim=64, padding=3)
        check(case, causal(case))

    def test_a_window_in_pages_as_large_as_a_tile(self):
        """On several multiprocessors, in both directions of dealing out."""
        case = case_of(
            [(384, 20), (130, 3)], jnp.float16, page_size=128, heads=(8, 1), dim=128, padding=1
        )
        check(case, causal(case, window=100), num_sms=2)

    def test_small_pages_and_the_largest_head_dim_with_soft_cap(self):
        case = case_of([(70, 70), (90, 5)], page_size=16, heads=(1, 1), dim=256)
        check(case, causal(case), soft_cap=2.0)

    @pytest.mark.parametrize(
        ("stored", "dtype", "page_size", "dim"),
        [(jnp.float8_e4m3fn, jnp.bfloat16, 64, 64), (jnp.int8, jnp.float16, 16, 128)],
    )
    def test_quantized_pages(self, stored, dtype, page_size, dim):
        """Units of several tiles and of one, with ends of which nothing is seen."""
        shapes = {"page_size": page_size, "heads": (4, 1), "dim": dim, "padding": 3}
        case = case_of([(140, 40), (3, 3), (300, 30)], dtype, stored, **shapes)
        check(case, causal(case, window=100), scale=0.02)

    def test_scales_of_tokens(self):
        """Of more tiles than the scales' ring has slots."""
        chunks = [(460, 40), (3, 3), (100, 30)]
        shapes = {"page_size": 32, "heads": (4, 1), "dim": 128, "padding": 3}
        case = case_of(chunks, **shapes)
        case.pages = scaled(Case([], chunks, **shapes).pages, jnp.float8_e4m3fn)
        check(case, causal(case))

    @pytest.mark.parametrize(("dim", "context", "window"), [(64, 240, 104), (256, 170, 32)])
    def test_a_first_tile_of_which_some_tokens_see_nothing(self, dim, context, window):
        """At the scale of that head_dim: products with -1e30 are rounded up there."""
        case = case_of([(context, 16)], page_size=64, heads=(4, 1), dim=dim)
        check(case, causal(case, window), scale=dim**-0.5)

    def test_ranges_that_are_not_causal(self):
        """Of a tree all tokens see the same; of a ring's far shard some see nothing."""
        case = case_of([(100, 8), (200, 24)], page_size=32, heads=(2, 2), dim=64)
        until = np.concatenate([np.full(8, 92), np.zeros(10), np.arange(150, 164)])
        since = np.concatenate([np.full(8, 3), np.full(14, 7), np.full(10, 140)])
        check(case, Visible(np.int32(since), np.int32(until)))

    def test_a_row_does_not_depend_on_its_neighbours(self):
        """To the last bit, even when it shares its blocks of tokens."""
        case = case_of([(40, 5), (140, 14), (30, 6)], page_size=32, heads=(8, 1), dim=64)
        visible = causal(case)
        together = prefill(case, visible)
        case.batch = case.batch._replace(lengths=np.int32([0, 14, 0]))
        own = slice(5, 19)
        for whole, single in zip(together, prefill(case, visible)):
            np.testing.assert_array_equal(whole[own], single[own])

    def test_nothing_outside_the_pool_or_the_tables_is_read(self):
        """The interpreter raises where a GPU would read memory that is not its own."""
        case = case_of([(128, 4)], page_size=64, heads=(1, 1), dim=64, poison=1.0)
        case.batch = case.batch._replace(tables=np.int32([[-5, 2**31 - 1]]))
        out, lse = prefill(case, Visible(np.full(4, -7, np.int32), np.full(4, 10_000, np.int32)))
        clipped = case.batch._replace(tables=np.int32([[0, len(case.pages.k) - 1]]))
        visible = Visible(np.zeros(4, np.int32), np.full(4, 128, np.int32))
        expected_out, expected_lse = reference.attend(
            case.q, case.pages, clipped, visible, num_decodes=0, scale=SCALE
        )
        np.testing.assert_allclose(out.astype(np.float64), expected_out, atol=0.03)
        np.testing.assert_allclose(lse, expected_lse, rtol=2e-5)


TILE = 32


@functools.partial(jax.jit, static_argnames=("size", "end"))
def list_work(batch, visible, size, end):
    return work_list(batch, visible, size=size, tile=TILE, end=end, positions=400)


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 50), min_size=4, max_size=4),
    gaps=st.lists(st.integers(0, 9), min_size=4, max_size=4),
    befores=st.lists(st.integers(0, 300), min_size=4, max_size=4),
    window=st.sampled_from([None, 1, 40]),
    size=st.sampled_from([16, 64]),
)
def test_the_work_list_has_every_token_that_sees_once(lengths, gaps, befores, window, size):
    starts = np.cumsum(gaps) + np.cumsum([0, *lengths[:-1]])
    contexts = np.add(befores, lengths)
    batch = RaggedBatch(*map(np.int32, (np.zeros((4, 1)), contexts, starts, lengths)))
    visible = Visible(*map(np.asarray, masks.causal(batch, 240, 0, window, None)))
    work = Work(*map(np.asarray, list_work(batch, visible, size, 240)))
    blocks = [Block(*map(int, block)) for block in work.blocks[: work.count[0]]]
    assert [block.tiles for block in blocks] == sorted((b.tiles for b in blocks), reverse=True)

    for token in range(240):
        row = [r for r in range(4) if starts[r] <= token < starts[r] + lengths[r]]
        assert work.sees[token] == bool(row)
        if row:
            block = blocks[work.number[token]]
            assert [block.row] == row and block.start + work.offset[token] == token

    for block, limits in zip(blocks, work.limits):
        assert block.start % 8 == 0 and 0 <= block.start <= 240 - size
        first = block.first_tile * TILE
        tokens = np.arange(block.start, block.start + size)
        row_start = starts[block.row]
        own = (tokens >= row_start) & (tokens < row_start + lengths[block.row])
        assert not limits[:, ~own].any()
        since, until = limits[:, own] + first
        np.testing.assert_array_equal(since, visible.since[tokens[own]])
        np.testing.assert_array_equal(until, visible.until[tokens[own]])
        assert (block.since, block.until) == (since.min(), until.max())
        assert first <= block.since < first + TILE
        assert 0 <= first + block.tiles * TILE - block.until < TILE
        for tile in range(block.tiles):
            start = first + tile * TILE
            in_full = since.max() <= start and start + TILE <= until.min()
            assert (block.whole <= tile < block.rest) == in_full


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"dim": 80}, r"head_dim is 80; it can be one of \(64, 128, 256\)"),
        ({"page_size": 8}, r"page_size is 8; it can be one of \(16, 32, 64, 128\)"),
        ({"heads": (3, 2)}, "3 query heads cannot be shared evenly among 2 KV heads"),
        ({"stored": jnp.int8, "dim": 256}, "head_dim is 256; with pages of int8 it can be 64 or"),
        ({"dtype": jnp.float32}, "queries are float32; they can be bfloat16 or float16"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(kind, message):
    case = case_of([(5, 5)], **{"page_size": 16, "heads": (2, 1), "dim": 64} | kind)
    with pytest.raises(ValueError, match=message):
        paged_prefill(case.q, case.pages, case.batch, causal(case), scale=SCALE)


def test_a_scale_that_is_not_positive_is_refused():
    case = case_of([(5, 5)], page_size=16, heads=(2, 1), dim=64)
    with pytest.raises(ValueError, match="scale is 0; it must be positive"):
        paged_prefill(case.q, case.pages, case.batch, causal(case), scale=0)
