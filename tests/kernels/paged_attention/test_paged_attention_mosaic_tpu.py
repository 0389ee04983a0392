"""The TPU kernel interpreted on the host, against float64 loops.

Mostly compiled to XLA, which is fast; and in small by the simulator that detects races and starts
from memory full of NaNs. Blocks are a few positions, so that short contexts have many.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_paged_attention import SCALE, Case, PagedAttentionContract

from pallas_kernels.compat import tpu as compat
from pallas_kernels.paged_attention import (
    KVPages,
    RaggedBatch,
    Visible,
    attend,
    masks,
    paged_attention,
    reference,
)
from pallas_kernels.paged_attention.tpu import attention, kernel
from pallas_kernels.paged_attention.tpu.work import Items, work_list

pytestmark = pytest.mark.interpreted


# Ready sooner than optimised code; without fusion emitters too, two ways of one sum round apart.
SAME_BITS = {"xla_backend_optimization_level": 0}


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 8 positions, or of one page, in a ring of three."""
    monkeypatch.setattr(kernel, "DECODE_SPAN", 8)
    monkeypatch.setattr(kernel, "CHUNK_SPAN", 8)
    monkeypatch.setattr(kernel, "MAX_SLOTS", 3)


@pytest.mark.usefixtures("small_blocks")
class TestInterpreted(PagedAttentionContract):
    implementation = staticmethod(functools.partial(paged_attention, backend="pallas"))
    attend = staticmethod(functools.partial(attend, backend="pallas"))
    page_sizes = (4,)


def run(case, window=None, interpret=True, cores=1, **options):
    """The kernel as two of a device's cores would run it, or one."""

    def call(q, pages, batch):
        visible = masks.causal(batch, len(q), case.num_decodes, window, None)
        return attention.paged_attention(
            q,
            pages,
            batch,
            visible,
            num_decodes=case.num_decodes,
            scale=SCALE,
            interpret=interpret,
            **options,
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "tpu_cores", lambda: cores)
        jitted = jax.jit(call, compiler_options=SAME_BITS)
        results = jitted(*jax.tree.map(jnp.asarray, (case.q, case.pages, case.batch)))
        return jax.tree.map(np.asarray, results)


def check(case, results, tolerance=2e-5, **options):
    expected = reference.paged_attention(
        case.q, case.pages, case.batch, num_decodes=case.num_decodes, scale=SCALE, **options
    )
    for found, right in zip(results, expected):
        np.testing.assert_allclose(found.astype(np.float64), right, rtol=tolerance, atol=tolerance)


@pytest.mark.oldest_jax
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("cores", [1, 2])
def test_no_copy_races_with_what_it_brings_or_replaces(cores):
    """More blocks than slots, rows without any, two rows in a tile of queries; two cores."""
    case = Case([21, 0, 3], [(7, 4), (18, 6)], page_size=4, heads=(2, 2), dim=4, padding=1)
    with compat.tpu_interpreter(cores=cores) as interpreter:
        results = run(case, interpret=interpreter, cores=cores)
    check(case, results)


def test_blocks_and_tiles_as_large_as_on_a_device():
    """With values in rows of features, as they lie on a TPU where head_dim is 128."""
    kind = {"page_size": 128, "heads": (4, 1), "dim": 128}
    case = Case([5000, 127, 0, 2049], [(900, 300), (513, 1), (40, 40)], **kind)
    case.q = np.asarray(jnp.asarray(case.q, jnp.bfloat16))
    case.pages = jax.tree.map(
        lambda array: np.asarray(jnp.asarray(array, jnp.bfloat16)), case.pages
    )
    case.q = case.q / np.sqrt(128).astype(case.q.dtype)
    check(case, run(case), tolerance=0.02)
    check(case, run(case, window=600), tolerance=0.02, window=600)


@pytest.mark.usefixtures("small_blocks")
def test_tables_that_do_not_fit_are_taken_in_parts(monkeypatch):
    """To the last bit the same; so are two cores, each with half of the heads."""
    case = Case([21, 9, 0, 3], [(7, 4), (18, 6), (5, 5)], page_size=4, padding=2)
    whole = run(case)
    monkeypatch.setattr(attention, "MAX_TABLE", 2 * case.batch.tables.shape[1])
    for other in (run(case), run(case, cores=2)):
        for left, right in zip(whole, other):
            np.testing.assert_array_equal(left, right)


@pytest.mark.usefixtures("small_blocks")
def test_a_chunk_does_not_depend_on_its_neighbours():
    """To the last bit, though they share tiles of queries and blocks are masked that were not."""
    case = Case([], [(40, 9), (37, 21), (50, 30), (3, 3)], page_size=4)
    together = run(case)
    lengths = case.batch.lengths * np.int32([0, 1, 0, 0])
    case.batch = case.batch._replace(lengths=lengths, context=case.batch.context * (lengths > 0))
    for whole, single in zip(together, run(case)):
        np.testing.assert_array_equal(whole[9:30], single[9:30])


def test_tokens_after_all_rows_get_nothing():
    """Where every row is a decode there is no work list for them."""
    case = Case([5], page_size=4)
    case.q = np.concatenate([case.q, case.q])
    out, lse = run(case)
    np.testing.assert_array_equal(out[1], 0)
    np.testing.assert_array_equal(lse[1], -np.inf)
    assert np.isfinite(out[0]).all() and np.isfinite(lse[0]).all()


def shapes(heads=(8, 2), dim=128, page_size=128, dtype=jnp.bfloat16, kv_dtype=None, max_pages=8):
    """Arguments that are only described."""
    array = jax.ShapeDtypeStruct
    query_heads, kv_heads = heads
    kv_dtype = kv_dtype or dtype
    k = array((9, kv_heads, dim, page_size), kv_dtype)
    v = array((9, kv_heads, page_size, dim), kv_dtype)
    ints = array((4,), jnp.int32)
    batch = RaggedBatch(array((4, max_pages), jnp.int32), ints, ints, ints)
    return array((4, query_heads, dim), dtype), KVPages(k, v), batch, Visible(ints, ints)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"dtype": jnp.float16}, "queries are float16; they can be of bfloat16, float32"),
        ({"kv_dtype": jnp.float32}, "keys are float32; they can be of bfloat16, int8, float8_e4m"),
        ({"dim": 96}, r"head_dim is 96; it can be one of \(64, 128, 256\)"),
        ({"page_size": 64}, "page_size is 64; it can be a multiple of 128 up to 1024"),
        ({"page_size": 2048}, "page_size is 2048; it can be a multiple of 128 up to 1024"),
        ({"heads": (8, 3)}, "8 query heads share 3 KV heads"),
        ({"heads": (129, 1)}, "a whole number of them up to 128"),
        ({"max_pages": 131_073}, "a row may have 131073 pages; it can have up to 131072"),
    ],
)
def test_what_a_tpu_cannot_do_is_refused(kind, message):
    call = functools.partial(attention.paged_attention, num_decodes=4, scale=SCALE)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(call, *shapes(**kind))


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"dtype": jnp.float32, "dim": 64},
        {"kv_dtype": jnp.int8, "dim": 256, "page_size": 1024},
        {"kv_dtype": jnp.float8_e4m3fn, "heads": (128, 1), "max_pages": 131_072},
    ],
)
def test_what_a_tpu_can_do_is_not_refused(kind):
    arguments = shapes(**kind)
    call = functools.partial(attention.paged_attention, num_decodes=4, scale=SCALE)
    out, lse = jax.eval_shape(call, *arguments)
    assert (out.shape, out.dtype) == (arguments[0].shape, arguments[0].dtype)
    assert (lse.shape, lse.dtype) == (out.shape[:2], jnp.float32)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_the_work_list_meets_every_token_once(data):
    queries, tiles = 4, 5
    lengths = np.int32(data.draw(st.lists(st.integers(0, 6), min_size=3, max_size=3)))
    gap = data.draw(st.integers(0, queries * tiles - int(lengths.sum())))
    starts = (gap + np.cumsum(lengths) - lengths).astype(np.int32)
    limits = np.zeros((tiles * queries, 2), np.int32)
    owner = np.full(tiles * queries, -1)
    for row, (start, length) in enumerate(zip(starts, lengths)):
        owner[start : start + length] = row
        for column in range(2):
            drawn = st.lists(st.integers(0, 9), min_size=int(length), max_size=int(length))
            limits[start : start + length, column] = sorted(data.draw(drawn))
    starts = np.where(lengths > 0, starts, queries * tiles).astype(np.int32)
    begins = np.sort(np.concatenate([np.arange(0, tiles * queries, queries), starts]))
    listed, following = work_list(
        jnp.asarray(begins, jnp.int32), starts, lengths, limits.reshape(tiles, queries, 2)
    )
    items = [Items(*fields) for fields in zip(*(field.tolist() for field in listed))]

    met = np.zeros(tiles * queries, int)
    for item in items:
        own = np.arange(tiles * queries)[item.tile * queries :][item.first : max(item.last, 0)]
        met[own] += 1
        assert (owner[own] == item.row).all()
        since, until = limits[own].T
        seen = [set(range(*pair)) for pair in zip(since, until)]
        anything = set().union(*seen)
        assert anything <= set(range(item.since, item.until))
        assert bool(anything) == (item.since < item.until)
        if anything:
            assert {item.since, item.until - 1} <= anything
        of_tile = owner[item.tile * queries : (item.tile + 1) * queries]
        if item.all_since < item.all_until:
            assert (of_tile == item.row).all()
            assert set(range(item.all_since, item.all_until)) == set.intersection(*seen)
    np.testing.assert_array_equal(met, owner >= 0)
    assert [item.tile for item in items] == sorted(item.tile for item in items)
    assert {item.tile for item in items} == set(range(tiles))
    busy = [index for index, item in enumerate(items) if item.since < item.until]
    for index, next_busy in enumerate(following.tolist()):
        assert next_busy == min((n for n in busy if n >= index), default=len(items))
