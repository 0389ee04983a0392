"""The Hopper decode kernel, interpreted on the host with races detected, against float64 loops.

The interpreter compiles each simulated warpgroup in every call, so there are few calls, each
with rows of many kinds. It proves paging, masks, splits, barriers and the reuse of buffers. It does
not prove how operands lie in registers and shared memory.
"""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_paged_attention import Case, scaled

from pallas_kernels.compat import gpu as compat
from pallas_kernels.paged_attention import (
    KVPages,
    RaggedBatch,
    Visible,
    masks,
    reference,
    xla,
)
from pallas_kernels.paged_attention.gpu import attention
from pallas_kernels.paged_attention.gpu.decode import paged_decode
from pallas_kernels.paged_attention.gpu.decode_work import TILE, Cutting

SCALE = 0.3


def case_of(contexts, chunks=(), dtype=jnp.bfloat16, stored=None, **kind):
    """A batch in half precision, with pages of dtype `stored`; NaNs wherever nothing was written,
    or in integers nonsense."""
    case = Case(contexts, chunks, **kind)
    stored = jnp.dtype(stored or dtype)
    case.q = np.asarray(jnp.asarray(case.q, dtype))
    pages = case.pages
    if stored == jnp.int8:
        pages = jax.tree.map(lambda array: np.where(np.isnan(array), 127, array * 10), pages)
    case.pages = jax.tree.map(lambda array: np.asarray(jnp.asarray(array).astype(stored)), pages)
    return case


def causal(case, window=None):
    """What causal attention sees, with a window or not."""
    visible = masks.causal(case.batch, len(case.q), case.num_decodes, window, None)
    return Visible(*map(np.array, visible))


def run(kernel, case, visible, **options):
    """Interpreted."""

    def function(*arguments):
        return kernel(*arguments, num_decodes=case.num_decodes, interpret=interpreter, **options)

    with compat.gpu_interpreter(detect_races=True) as interpreter:
        arguments = case.q, case.pages, case.batch, visible
        out, lse = jax.jit(function)(*jax.tree.map(jnp.asarray, arguments))
        return np.asarray(out), np.asarray(lse)


def decode(case, visible, num_sms=1, **options):
    """In splits of one tile."""
    options = {"scale": SCALE, "split_tokens": TILE, "num_sms": num_sms} | options
    return run(paged_decode, case, visible, **options)


def check(case, visible, results, scale=SCALE, **options):
    """Wrong by no more than rounding the weights to the dtype explains."""
    out, lse = results
    assert out.dtype == case.q.dtype and lse.dtype == np.float32
    expected_out, expected_lse = reference.attend(
        case.q,
        case.pages,
        case.batch,
        visible,
        num_decodes=case.num_decodes,
        scale=scale,
        **options,
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
    def test_around_boundaries_of_pages_tiles_and_splits(self):
        """Pages smaller than a tile, many entries for each worker, and one row of more splits than
        are merged at once."""
        contexts = [1, 16, 17, 0, 63, 64, 65, 600]
        case = case_of(contexts, page_size=16, heads=(4, 2), dim=64)
        check(case, causal(case), decode(case, causal(case)))

    def test_any_range_in_pages_larger_than_a_tile(self):
        """With a window, from the middle of a context on, up to it, and of nothing at all."""
        contexts = [1, 100, 0, 230, 300, 300]
        case = case_of(contexts, dtype=jnp.float16, page_size=128, heads=(3, 1), dim=128)
        since, until = causal(case, window=100)
        until[4], since[5] = 250, 300
        visible = Visible(since, until)
        check(case, visible, decode(case, visible))

    def test_a_soft_cap_and_the_largest_group(self):
        case = case_of([0, 70], page_size=32, heads=(64, 1), dim=64)
        results = decode(case, causal(case), soft_cap=2.0)
        check(case, causal(case), results, soft_cap=2.0)

    @pytest.mark.parametrize(
        ("stored", "dtype", "page_size"),
        [(jnp.int8, jnp.bfloat16, 64), (jnp.float8_e4m3fn, jnp.float16, 16)],
    )
    def test_quantized_pages(self, stored, dtype, page_size):
        """Of more tiles than land before the first is unpacked, and of fewer."""
        shapes = {"page_size": page_size, "heads": (2, 1), "dim": 256}
        case = case_of([200, 0, 30], dtype=dtype, stored=stored, **shapes)
        visible = causal(case, window=150)
        check(case, visible, decode(case, visible, scale=0.02), scale=0.02)

    def test_scales_of_tokens(self):
        """Of more tiles than the scales' ring has slots."""
        case = case_of([400, 0, 30], page_size=64, heads=(2, 1), dim=128)
        case.pages = scaled(Case([400, 0, 30], page_size=64, heads=(2, 1), dim=128).pages, jnp.int8)
        check(case, causal(case), decode(case, causal(case), split_tokens=512))

    def test_a_row_does_not_depend_on_its_neighbours_or_its_worker(self):
        """To the last bit; with the largest head_dim, on one block of threads and on two."""
        case = case_of([70, 150, 0], page_size=64, heads=(2, 2), dim=256)
        since, until = causal(case)
        together = decode(case, Visible(since, until), num_sms=2)
        check(case, Visible(since, until), together)
        alone = decode(case, Visible(since, np.int32([0, 150, 0])))
        for whole, single in zip(together, alone):
            np.testing.assert_array_equal(whole[1], single[1])

    def test_nothing_outside_the_pool_or_the_tables_is_read(self):
        """The interpreter raises where a GPU would read memory that is not its own."""
        case = case_of([128], page_size=64, heads=(1, 1), dim=256, poison=1.0)
        last = len(case.pages.k) - 1
        case.batch = case.batch._replace(tables=np.int32([[-5, 2**31 - 1]]))
        results = decode(case, Visible(np.int32([-70]), np.int32([10_000])))
        case.batch = case.batch._replace(tables=np.int32([[0, last]]))
        check(case, causal(case), results)


def test_decodes_and_chunks_go_each_to_their_kernel(monkeypatch):
    """Both played by XLA here: what they compute is for their own tests."""

    def decode(q, pages, batch, visible, *, num_decodes, scale, soft_cap, interpret, out_dtype):
        assert interpret is None and out_dtype == jnp.float32
        mine = jax.tree.map(lambda array: array[:num_decodes], (batch, visible))
        options = {"num_decodes": num_decodes, "scale": scale, "soft_cap": soft_cap}
        return xla.paged_attention(q[:num_decodes], pages, *mine, **options)

    def prefill(*arguments, scale, soft_cap, interpret):
        assert interpret is None
        return xla.paged_attention(*arguments, num_decodes=0, scale=scale, soft_cap=soft_cap)

    monkeypatch.setattr(attention.decode, "paged_decode", decode)
    monkeypatch.setattr(attention.prefill, "paged_prefill", prefill)
    case = Case([30, 0, 70], [(40, 25), (9, 9)], page_size=16, padding=3)
    options = {"num_decodes": 3, "scale": SCALE, "soft_cap": 2.0}
    arguments = case.q, case.pages, case.batch, causal(case)
    results = attention.paged_attention(*jax.tree.map(jnp.asarray, arguments), **options)
    for found, expected in zip(results, reference.attend(*arguments, **options)):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("contexts", "chunks", "kernels"),
    [([5], [], {"decode"}), ([], [(9, 4)], {"prefill"}), ([5], [(9, 4)], {"decode", "prefill"})],
)
def test_a_program_holds_the_kernels_that_its_batches_need(contexts, chunks, kernels):
    case = case_of(contexts, chunks, page_size=16, heads=(2, 1), dim=64)

    def attend(*arguments):
        return attention.paged_attention(
            *arguments, num_decodes=case.num_decodes, scale=SCALE, soft_cap=None
        )

    program = str(jax.make_jaxpr(attend)(case.q, case.pages, case.batch, causal(case)))
    assert {kind for kind in ("decode", "prefill") if f"paged_{kind}_kernel" in program} == kernels


@functools.partial(jax.jit, static_argnums=0)
def plan(cutting, since, until):
    """As many entries as there could be, and where those of each row end."""
    ends = cutting.ends(since, until)
    numbers = jnp.minimum(jnp.arange(len(since) * cutting.splits), ends[-1] - 1)
    return jax.vmap(lambda n: cutting.entry(n, ends, since, until, len(since)))(numbers), ends


def entries(cutting, since, until):
    """All entries of rows that see these positions, and how many splits each row has."""
    every, ends = jax.tree.map(np.asarray, plan(cutting, np.int32(since), np.int32(until)))
    every = [type(every)(*map(int, fields)) for fields in zip(*every)]
    return every[: ends[-1]], np.diff(ends, prepend=0)


@settings(max_examples=20, deadline=None)
@given(
    contexts=st.lists(st.integers(0, 40 * 64), min_size=5, max_size=5),
    window=st.sampled_from([None, 1, 64, 300]),
    splits=st.sampled_from([1, 3, 8]),
)
def test_the_entries_cover_every_visible_tile_once(contexts, window, splits):
    until = np.int32(contexts)
    since = np.maximum(until - window, 0) if window else np.zeros_like(until)
    cutting = Cutting(tokens=40 * 64, split_tiles=2, splits=splits)
    found, counts = entries(cutting, since, until)
    assert counts.max() <= splits
    for row in range(len(contexts)):
        own = [entry for entry in found if entry.row == row]
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


@pytest.mark.parametrize("context", [8, 16, 33, 68, 100, 128])
def test_long_rows_are_cut_evenly(context):
    """Of so many thousand tokens, in at most 32 splits for each of 8 KV heads: no multiprocessor of
    132 has much more to do than the average, as it would if sizes were powers of two."""
    tiles = context * 1024 // TILE
    cutting = Cutting(tokens=256 * 1024, split_tiles=8, splits=32)
    found, _ = entries(cutting, [0], [context * 1024])
    sizes = [entry.tiles for entry in found for _ in range(8)]
    load = [sum(sizes[block::132]) for block in range(132)]
    assert sum(load) == 8 * tiles
    assert 8 * tiles / 132 / max(load) > 0.93


def test_how_a_row_is_cut_depends_on_nothing_but_its_context():
    """Not on the width of the tables either, which may follow the longest row."""
    contexts = np.int32([100, 5000, 900, 64])
    cut = {}
    for tokens in (80 * 64, 4000 * 64):
        for until in (contexts, contexts[::-1]):
            cutting = Cutting(tokens, split_tiles=2, splits=8)
            for entry in entries(cutting, np.zeros(4), until)[0]:
                tiles = entry.first_tile, entry.tiles
                assert cut.setdefault((entry.until, entry.split), tiles) == tiles
    assert {until for until, _ in cut} == set(contexts.tolist())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"dim": 80}, r"head_dim is 80; it can be one of \(64, 128, 256\)"),
        ({"page_size": 8}, r"page_size is 8; it can be one of \(16, 32, 64, 128\)"),
        ({"heads": (3, 2)}, "3 query heads share 2 KV heads"),
        ({"heads": (65, 1)}, "a whole number of them up to 64"),
        ({"dtype": jnp.float32}, "queries are float32; they can be bfloat16 or float16"),
        (
            {"stored": jnp.float16},
            "keys are float16 and values float16; with queries of bfloat16, both can be bfloat16, "
            "int8 or float8_e4m3fn",
        ),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(kind, message):
    case = case_of([5], **{"page_size": 16, "heads": (2, 1), "dim": 64} | kind)
    arguments = case.q, case.pages, case.batch, causal(case)
    options = {"num_decodes": 1, "scale": SCALE}
    with pytest.raises(ValueError, match=message):
        paged_decode(*arguments, **options)
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arguments)
    assert re.search(message, attention.unsupported(*shapes, **options))


def test_partial_results_beyond_32_bits_are_refused():
    """256 rows of the largest group: their kernels would write to wrong places."""

    def refusal(rows):
        ints = jax.ShapeDtypeStruct((rows,), jnp.int32)
        tables = jax.ShapeDtypeStruct((rows, 2048), jnp.int32)
        pages = KVPages(
            jax.ShapeDtypeStruct((9, 1, 128, 64), jnp.bfloat16),
            jax.ShapeDtypeStruct((9, 1, 64, 128), jnp.bfloat16),
        )
        q = jax.ShapeDtypeStruct((rows, 64, 128), jnp.bfloat16)
        batch = RaggedBatch(tables, ints, ints, ints)
        visible = Visible(ints, ints)
        return attention.unsupported(q, pages, batch, visible, num_decodes=rows, scale=SCALE)

    assert refusal(255) is None
    assert "256 decodes in 256 splits have 2147483648 bytes" in refusal(256)


def test_other_arguments_are_refused():
    case = case_of([5], page_size=16, heads=(2, 1), dim=64)
    arguments = case.q, case.pages, case.batch, causal(case)
    with pytest.raises(ValueError, match="split_tokens is 100; it must be a multiple of 64"):
        paged_decode(*arguments, num_decodes=1, scale=SCALE, split_tokens=100)
    with pytest.raises(ValueError, match="num_decodes is 0"):
        paged_decode(*arguments, num_decodes=0, scale=SCALE)


def test_chunks_of_the_largest_quantized_pages_are_left_to_xla():
    """Beside decodes; alone, they are refused."""
    case = case_of([5], [(9, 4)], stored=jnp.int8, page_size=16, heads=(2, 1), dim=256)
    arguments = case.q, case.pages, case.batch, causal(case)
    attend = functools.partial(attention.paged_attention, num_decodes=1, scale=SCALE)
    program = str(jax.make_jaxpr(attend)(*arguments))
    assert "paged_decode_kernel" in program and "paged_prefill_kernel" not in program
    q, batch, visible = jax.tree.map(lambda array: array[1:], (case.q, case.batch, causal(case)))
    reason = attention.unsupported(q, case.pages, batch, visible, num_decodes=0, scale=SCALE)
    assert "head_dim is 256; with pages of int8 it can be 64 or 128" in reason
