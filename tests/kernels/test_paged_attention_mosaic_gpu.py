"""The Hopper decode kernel, interpreted on the host with races detected, against float64 loops.

The interpreter compiles each simulated warpgroup anew in every call, so there are few calls, each
with rows of many kinds. It proves paging, masks, splits, barriers and the reuse of buffers. It does
not prove how operands lie in registers and shared memory.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_paged_attention import Case

from pallas_kernels import compat
from pallas_kernels.paged_attention import KVPages, decode_work
from pallas_kernels.paged_attention.mosaic_gpu_decode import paged_decode

SCALE = 0.3


def case_of(contexts, dtype=jnp.bfloat16, **kind):
    """A batch of decodes in half precision; NaNs wherever nothing was written."""
    case = Case(contexts, **kind)
    case.q = np.asarray(jnp.asarray(case.q, dtype))
    case.pages = KVPages(*(np.asarray(jnp.asarray(array, dtype)) for array in case.pages))
    return case


def decode(case, num_sms=1, **options):
    """Interpreted, in splits of one tile."""

    def run(q, pages, batch):
        return paged_decode(
            q,
            pages,
            batch,
            num_decodes=case.num_decodes,
            scale=SCALE,
            split_tokens=64,
            num_sms=num_sms,
            interpret=interpreter,
            **options,
        )

    with compat.gpu_interpreter(detect_races=True) as interpreter:
        out, lse = jax.jit(run)(*jax.tree.map(jnp.asarray, (case.q, case.pages, case.batch)))
        return np.asarray(out), np.asarray(lse)


def expected(case, window=None, soft_cap=None, sinks=None):
    """What `decode` should give, float64."""
    q = np.asarray(case.q, np.float64)
    keys, values = (np.asarray(array, np.float64) for array in case.pages)
    page_size, group = values.shape[2], q.shape[1] // values.shape[1]
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for row, context in enumerate(case.batch.context):
        positions = np.arange(max(0, context - window) if window else 0, context)
        pages = np.clip(case.batch.tables[row, positions // page_size], 0, len(keys) - 1)
        for head in range(q.shape[1]) if context else ():
            k = keys[pages, head // group, :, positions % page_size]
            v = values[pages, head // group, positions % page_size]
            scores = k @ q[row, head] * SCALE
            if soft_cap is not None:
                scores = soft_cap * np.tanh(scores / soft_cap)
            sink = -np.inf if sinks is None else float(sinks[head])
            lse[row, head] = np.logaddexp(np.logaddexp.reduce(scores), sink)
            out[row, head] = np.exp(scores - lse[row, head]) @ v
    return out, lse


def check(case, num_sms=1, **options):
    """Wrong by no more than rounding the weights to the dtype explains."""
    out, lse = decode(case, num_sms, **options)
    assert out.dtype == case.q.dtype and lse.dtype == np.float32
    tolerance = 4 * float(jnp.finfo(case.q.dtype).eps)
    expected_out, expected_lse = expected(case, **options)
    assert not np.isnan(expected_out).any()
    np.testing.assert_allclose(out.astype(np.float64), expected_out, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)
    for row in np.flatnonzero(case.batch.context == 0):
        np.testing.assert_array_equal(out[row].astype(np.float32), 0)
        np.testing.assert_array_equal(lse[row], -np.inf)


class TestInterpreted:
    def test_around_boundaries_of_pages_tiles_and_splits(self):
        """Pages smaller than a tile; many entries for each worker."""
        contexts = [1, 16, 17, 0, 63, 64, 65, 200]
        check(case_of(contexts, page_size=16, heads=(4, 2), dim=64))

    def test_a_window_in_pages_larger_than_a_tile(self):
        contexts = [1, 100, 101, 0, 230, 300]
        case = case_of(contexts, jnp.float16, page_size=128, heads=(3, 1), dim=128)
        check(case, window=100)

    def test_soft_cap_sinks_and_the_largest_group(self):
        case = case_of([0, 70], page_size=32, heads=(64, 1), dim=64)
        sinks = jnp.linspace(-3, 3, 64)
        check(case, soft_cap=2.0, sinks=sinks)

    def test_the_largest_head_dim_on_several_blocks_of_threads(self):
        check(case_of([70, 0, 130], page_size=64, heads=(2, 2), dim=256), num_sms=2)

    def test_a_row_does_not_depend_on_its_neighbours(self):
        """To the last bit."""
        case = case_of([40, 150, 90], page_size=32, heads=(1, 1), dim=256)
        together = decode(case)
        case.batch = case.batch._replace(context=np.int32([0, 150, 0]))
        for whole, single in zip(together, decode(case)):
            np.testing.assert_array_equal(whole[1], single[1])

    def test_nothing_outside_the_pool_or_the_tables_is_read(self):
        """The interpreter raises where a GPU would read somebody else's memory."""
        case = case_of([128], page_size=64, heads=(1, 1), dim=256, poison=1.0)
        case.batch = case.batch._replace(tables=np.int32([[-5, 2**31 - 1]]))
        expected_out, expected_lse = expected(case)
        case.batch = case.batch._replace(context=np.int32([10_000]))
        out, lse = decode(case)
        np.testing.assert_allclose(out.astype(np.float64), expected_out, atol=0.03)
        np.testing.assert_allclose(lse, expected_lse, rtol=2e-5)


def work_list(since, until, *, max_tiles, splits):
    """Splits of two tiles, as numpy."""
    plan = jax.jit(decode_work.work_list, static_argnums=(2, 3, 4))
    return jax.tree.map(np.asarray, plan(since, until, max_tiles, 2, splits))


@settings(max_examples=60, deadline=None)
@given(
    contexts=st.lists(st.integers(0, 40 * 64), min_size=5, max_size=5),
    window=st.sampled_from([None, 1, 64, 300]),
    splits=st.sampled_from([1, 3, 8]),
)
def test_the_work_list_covers_every_visible_tile_once(contexts, window, splits):
    until = np.int32(contexts)
    since = np.maximum(until - window, 0) if window else np.zeros_like(until)
    work, counts = work_list(since, until, max_tiles=40, splits=splits)
    assert counts.max() <= splits
    entries = [decode_work.Entry(*entry) for entry in work[: counts.sum()]]
    for row in range(len(contexts)):
        own = [entry for entry in entries if entry.row == row]
        assert [entry.split for entry in own] == list(range(counts[row]))
        assert all((entry.since, entry.until) == (since[row], until[row]) for entry in own)
        covered = [
            tile
            for entry in own
            for tile in range(entry.first_tile, entry.first_tile + entry.tiles)
        ]
        visible = range(since[row] // 64, -(-until[row] // 64)) if until[row] else ()
        assert covered == list(visible)
        sizes = [entry.tiles for entry in own]
        assert all(0 < size <= sizes[0] for size in sizes) and len(set(sizes[:-1])) <= 1


def test_how_a_row_is_cut_depends_on_nothing_but_its_context():
    """Not on the width of the tables either, which may follow the longest row."""
    contexts = np.int32([100, 5000, 900, 64])
    cut = {}
    for max_tiles in (80, 4000):
        for rows in (contexts, contexts[::-1]):
            work, counts = work_list(np.zeros(4, np.int32), rows, max_tiles=max_tiles, splits=8)
            for entry in work[: counts.sum()]:
                _, split, first_tile, tiles, _, until = entry.tolist()
                assert cut.setdefault((until, split), (first_tile, tiles)) == (first_tile, tiles)
    assert {until for until, _ in cut} == set(contexts.tolist())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"dim": 80}, r"head_dim is 80; it can be one of \(64, 128, 256\)"),
        ({"page_size": 8}, r"page_size is 8; it can be one of \(16, 32, 64, 128\)"),
        ({"heads": (3, 2)}, "3 query heads share 2 KV heads"),
        ({"heads": (65, 1)}, "a whole number of them up to 64"),
        ({"dtype": jnp.float32}, "must be of one of bfloat16, float16"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(kind, message):
    case = case_of([5], **{"page_size": 16, "heads": (2, 1), "dim": 64} | kind)
    with pytest.raises(ValueError, match=message):
        paged_decode(case.q, case.pages, case.batch, num_decodes=1, scale=SCALE)


def test_other_arguments_are_refused():
    case = case_of([5], page_size=16, heads=(2, 1), dim=64)
    with pytest.raises(ValueError, match="split_tokens is 100; it must be a multiple of 64"):
        paged_decode(case.q, case.pages, case.batch, num_decodes=1, scale=SCALE, split_tokens=100)
    with pytest.raises(ValueError, match="window is 0"):
        paged_decode(case.q, case.pages, case.batch, num_decodes=1, scale=SCALE, window=0)
    with pytest.raises(ValueError, match="num_decodes is 0"):
        paged_decode(case.q, case.pages, case.batch, num_decodes=0, scale=SCALE)
