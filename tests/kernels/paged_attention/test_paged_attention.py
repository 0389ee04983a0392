"""One contract for every implementation of paged attention, against float64 loops."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unoptimised import UNOPTIMISED

from pallas_kernels.paged_attention import (
    DecodeGroups,
    KVPages,
    PageLayout,
    RaggedBatch,
    Visible,
    attend,
    paged_attention,
    reference,
    write_kv,
)
from pallas_kernels.paged_attention.layout import packed_int4, rotated, unpacked_int4

SCALE = 0.3
POISON = np.nan
"""Fills the trash page, unused pages and the unwritten rest of used ones: the least weight given
to any of it would show. Finite, as all that is ever written is."""

AS_SERVED = {}
"""Compiler options of an engine."""


@functools.cache
def _jit(implementation, compiler_options):
    return jax.jit(
        implementation,
        static_argnames=("num_decodes", "scale", "window", "soft_cap"),
        compiler_options=dict(compiler_options),
    )


class Case:
    """A random batch: `decodes` are context lengths, 0 for a padding row; `chunks` are pairs of
    (context, new tokens), and `padding` is how many tokens and rows belong to no sequence."""

    def __init__(
        self,
        decodes,
        chunks=(),
        *,
        page_size,
        heads=(4, 2),
        dim=8,
        padding=0,
        poison=POISON,
        seed=0,
    ):
        rng = np.random.default_rng(seed)
        query_heads, kv_heads = heads
        contexts = [*decodes, *(context for context, _ in chunks), *[0] * padding]
        lengths = [1] * len(decodes) + [new for _, new in chunks] + [0] * padding
        starts = np.cumsum([0, *lengths])
        tokens = int(starts[-1]) + padding
        needed = [-(-context // page_size) for context in contexts]
        num_pages = 1 + sum(needed) + 3
        order = rng.permutation(np.arange(1, num_pages))
        tables = np.zeros((len(contexts), max([1, *needed]) + 2), np.int32)
        k = np.full((num_pages, kv_heads, dim, page_size), poison, np.float32)
        v = np.full((num_pages, kv_heads, page_size, dim), poison, np.float32)
        for row, (context, pages) in enumerate(zip(contexts, needed)):
            tables[row, :pages], order = order[:pages], order[pages:]
            for position in range(context):
                page, offset = tables[row, position // page_size], position % page_size
                k[page, :, :, offset] = rng.normal(size=(kv_heads, dim))
                v[page, :, offset, :] = rng.normal(size=(kv_heads, dim))
        self.num_decodes = len(decodes)
        self.q = rng.normal(size=(tokens, query_heads, dim)).astype(np.float32)
        self.pages = KVPages(k, v)
        fields = (tables, contexts, starts[:-1], lengths)
        self.batch = RaggedBatch(*(np.asarray(field, np.int32) for field in fields))


def scaled(pages: KVPages, dtype) -> KVPages:
    """Pages quantized to `dtype`, with scales of tokens; NaNs where nothing was written."""
    rng, written = np.random.default_rng(1), ~np.isnan(pages.v[..., 0])
    pages = jax.tree.map(
        lambda x: (20 * np.where(np.isnan(x), 0, x)).clip(-127, 127).astype(dtype), pages
    )
    scales = rng.uniform(0.01, 0.1, (*written.shape[:2], 2, written.shape[2]))
    scales = np.where(written[:, :, None], scales, np.nan).astype(np.float32)
    return pages._replace(scales=scales)


class PagedAttentionContract:
    """What `implementation`, with the signature of `paged_attention`, must do."""

    implementation = None
    attend = None
    """With the signature of `attend`."""
    page_sizes = (1, 4, 32)
    """Of random batches: each is a program more to compile."""
    page_of_groups = 4
    """Page size of groups that share a prefix."""
    tolerance = 2e-5

    def case(self, *rows, **kind):
        """A `Case`, or the like of it that the implementation can do."""
        return Case(*rows, **kind)

    def run(self, case, compiler_options=UNOPTIMISED, **options):
        arrays = jax.tree.map(jnp.asarray, (case.q, case.pages, case.batch))
        jitted = _jit(type(self).implementation, tuple(compiler_options.items()))
        out, lse = jitted(*arrays, num_decodes=case.num_decodes, scale=SCALE, **options)
        return np.asarray(out), np.asarray(lse)

    def check(self, case, **options):
        out, lse = self.run(case, **options)
        assert out.dtype == case.q.dtype and lse.dtype == np.float32
        expected_out, expected_lse = reference.paged_attention(
            case.q, case.pages, case.batch, num_decodes=case.num_decodes, scale=SCALE, **options
        )
        assert not np.isnan(expected_out).any()
        close = {"rtol": self.tolerance, "atol": self.tolerance}
        np.testing.assert_allclose(out.astype(np.float64), expected_out, **close)
        np.testing.assert_allclose(lse, expected_lse, **close)

    @pytest.mark.parametrize("page_size", [1, 4, 64])
    def test_around_a_page_boundary(self, page_size):
        contexts = [pages * page_size + more for pages in (1, 3) for more in (-1, 0, 1)]
        contexts = [context for context in contexts if context]
        chunks = [(context, min(context, 3)) for context in contexts]
        self.check(self.case(contexts, chunks, page_size=page_size))

    @pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (5, 1)])
    def test_ratios_of_query_heads_to_kv_heads(self, heads):
        self.check(self.case([5, 9], [(7, 4)], page_size=4, heads=heads))

    @pytest.mark.parametrize("window", [1, 4, 5, 100])
    def test_windows(self, window):
        """Of the token alone, around a page, and wider than the context."""
        self.check(
            self.case([1, 4, 5, 17, 0], [(17, 17), (18, 5), (3, 1)], page_size=4), window=window
        )

    def test_a_long_chunk_takes_several_blocks_of_queries_and_of_context(self):
        self.check(self.case([], [(300, 150), (290, 290)], page_size=16, heads=(2, 1)))
        self.check(self.case([], [(300, 150), (290, 290)], page_size=16, heads=(2, 1)), window=70)

    def test_more_decodes_than_are_attended_to_together(self):
        self.check(self.case([*range(1, 20)], page_size=4))

    @pytest.mark.parametrize("padding", [1, 5])
    def test_padding_gets_nothing(self, padding):
        case = self.case([3, 0, 6, 0], [(9, 4)], page_size=4, padding=padding)
        out, lse = self.run(case)
        for unused in (1, 3, *range(8, 8 + padding)):
            np.testing.assert_array_equal(out[unused], 0)
            np.testing.assert_array_equal(lse[unused], -np.inf)
        self.check(case)

    def test_a_batch_of_nothing_but_padding(self):
        self.check(self.case([0, 0, 0], page_size=4))
        self.check(self.case([0, 0], page_size=4, padding=4))

    @settings(max_examples=12, deadline=None)
    @given(
        window=st.sampled_from([None, 6]),
        contexts=st.tuples(*[st.integers(0, 40)] * 4),
        chunk_contexts=st.tuples(*[st.integers(1, 40)] * 3),
        data=st.data(),
    )
    def test_any_ragged_batch(self, window, contexts, chunk_contexts, data):
        """Shapes are of a few kinds, so that few programs are compiled; their contents vary."""
        page_size = data.draw(st.sampled_from(self.page_sizes))
        lengths = [data.draw(st.integers(1, context)) for context in chunk_contexts]
        case = self.case(
            contexts, [*zip(chunk_contexts, lengths)], page_size=page_size, seed=sum(contexts)
        )
        self.check(widen(case, tokens=4 + 3 * 40, pages=310, table=44), window=window)

    def check_groups(self, contexts, groups, chunks=(), **kind):
        """Decodes with these contexts, of pages of 4 tokens or in proportion, in `groups` of
        (first, decodes, shared pages)."""
        size = self.page_of_groups
        contexts = [context * size // 4 for context in contexts]
        case = self.case(contexts, chunks, page_size=size, **kind)
        share(case, groups)
        self.check(case, groups=decode_groups(case, groups, len(contexts) // 2))

    def test_groups_that_share_their_first_pages(self):
        """Up to their last page, and with padding rows in between."""
        contexts = [16, 23, 17, 0, 9, 30, 0, 8, 11, 0]
        self.check_groups(contexts, [(0, 4, 4), (6, 3, 1)], [(9, 4)], heads=(6, 2))

    def test_groups_of_more_tokens_than_a_tile_over_several_blocks(self):
        self.check_groups([330, *range(300, 320)], [(0, 2, 70), (2, 19, 75)], heads=(2, 1))

    @settings(max_examples=12, deadline=None)
    @given(
        own=st.tuples(*[st.integers(0, 12)] * 10),
        sizes=st.lists(st.integers(1, 6), max_size=5),
        pages=st.tuples(*[st.integers(1, 6)] * 5),
        alone=st.tuples(*[st.integers(0, 2)] * 5),
    )
    def test_any_groups(self, own, sizes, pages, alone):
        """Every decode has tokens of its own after the pages that it shares; 0 are padding."""
        groups, first = [], 0
        for size, count, gap in zip(sizes, pages, alone):
            first += gap
            if first + size <= len(own):
                groups.append((first, size, count))
            first += size
        shared = {first + i: 4 * count for first, size, count in groups for i in range(size)}
        contexts = [tokens and tokens + shared.get(row, 0) for row, tokens in enumerate(own)]
        case = self.case(contexts, page_size=4, seed=sum(own))
        share(case, groups)
        widen(case, tokens=len(case.q), pages=110, table=14)
        self.check(case, groups=decode_groups(case, groups, room=10))

    @pytest.mark.parametrize("window", [None, 5])
    def test_a_decode_row_does_not_depend_on_its_neighbours(self, window):
        """To the last bit: whatever the other rows and the lengths of their contexts."""
        contexts = [9, 1, 30, 17, 4, 12, 25, 33, 2, 8]
        case = self.case(contexts, page_size=4)
        together = self.run(case, AS_SERVED, window=window)
        others = case.batch.context.copy()
        others[:3] = others[4:] = 0
        case.batch = case.batch._replace(context=others)
        for whole, single in zip(together, self.run(case, AS_SERVED, window=window)):
            np.testing.assert_array_equal(whole[3], single[3])

    def test_a_row_does_not_depend_on_where_its_pages_lie(self):
        case = self.case([9, 30], [(17, 5)], page_size=4)
        before = self.run(case, AS_SERVED)
        rng = np.random.default_rng(1)
        order = np.concatenate([[0], 1 + rng.permutation(len(case.pages.k) - 1)])
        case.pages = jax.tree.map(lambda array: array[np.argsort(order)], case.pages)
        case.batch = case.batch._replace(tables=order[case.batch.tables].astype(np.int32))
        for old, new in zip(before, self.run(case, AS_SERVED)):
            np.testing.assert_array_equal(old, new)

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_half_precision(self, dtype):
        """Wrong by no more than rounding the inputs and weights to `dtype` explains."""
        case = self.case([5, 40], [(20, 7)], page_size=4, poison=1e4)
        case.q = np.asarray(jnp.asarray(case.q, dtype))
        case.pages = jax.tree.map(lambda array: np.asarray(jnp.asarray(array, dtype)), case.pages)
        out, lse = self.run(case)
        assert out.dtype == dtype and lse.dtype == np.float32
        expected_out, expected_lse = reference.paged_attention(
            case.q, case.pages, case.batch, num_decodes=2, scale=SCALE
        )
        tolerance = 8 * float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(out.astype(np.float64), expected_out, atol=tolerance)
        np.testing.assert_allclose(lse, expected_lse, atol=tolerance)

    def test_a_soft_cap(self):
        self.check(self.case([5, 40], [(20, 7)], page_size=4), soft_cap=1.5)

    @pytest.mark.parametrize("window", [None, 6])
    def test_sinks_take_their_share(self, window):
        """But not of rows that see nothing."""
        sinks = np.float32([-5, 0, 3, 8])
        self.check(
            self.case([5, 0, 40], [(20, 7)], page_size=4, padding=2), sinks=sinks, window=window
        )

    @pytest.mark.parametrize("window", [None, 2, 7])
    @pytest.mark.parametrize("soft_cap", [None, 2.0])
    def test_trees(self, window, soft_cap):
        """A branching tree, one token, a tree without context, and a chunk too long to be one."""
        parents = [-1, 0, 0, 1, 1, 2, 3]
        case = self.case([9, 0], [(20, 7), (13, 1), (4, 4), (30, 12)], page_size=4, padding=3)
        mask = np.zeros((len(case.q), 7), bool)
        for row in (2, 3, 4):
            start = case.batch.starts[row]
            for token in range(case.batch.lengths[row]):
                node = token
                while node >= 0:
                    mask[start + token, node] = True
                    node = parents[node]
        self.check(case, tree_mask=mask, window=window, soft_cap=soft_cap)

    @pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
    def test_quantized_pages(self, dtype):
        """Scales of heads differ, and are undone; NaNs stand where nothing was written."""
        case = self.case([5, 0, 40], [(20, 7)], page_size=4, poison=0)
        scales = {"k_scale": np.float32([0.02, 0.5]), "v_scale": np.float32([0.25, 0.01])}
        elements = [
            (array / scale[:, None, None]).clip(-127, 127).astype(dtype)
            for array, scale in zip(case.pages, scales.values())
        ]
        case.pages = KVPages(*elements)
        self.check(case, **scales)

    @pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
    def test_scales_of_tokens(self, dtype):
        """Of every token and head; NaNs stand where nothing was written."""
        case = self.case([5, 0, 40], [(20, 7), (4, 4)], page_size=4, padding=2)
        case.pages = scaled(case.pages, dtype)
        self.check(case)
        self.check(case, window=6, soft_cap=1.5)
        tree = np.tri(7, dtype=bool)[np.minimum(np.arange(len(case.q)) - 3, 6).clip(0)]
        tree[10:14] = np.tri(7, dtype=bool)[:4]
        self.check(case, tree_mask=tree)

    @settings(max_examples=8, deadline=None)
    @given(data=st.data())
    def test_any_ranges(self, data):
        """Ranges that never decrease along a row, some of them empty."""
        page_size = data.draw(st.sampled_from(self.page_sizes))
        case = self.case([12, 0, 40], [(40, 9), (17, 17)], page_size=page_size)
        limits = np.zeros((2, len(case.q)), np.int32)
        rows = zip(*(field.tolist() for field in case.batch[1:]))
        for context, start, length in rows:
            for limit in limits:
                drawn = st.lists(st.integers(0, context), min_size=length, max_size=length)
                limit[start : start + length] = sorted(data.draw(drawn))
        visible = Visible(*limits)
        arrays = jax.tree.map(jnp.asarray, (case.q, case.pages, case.batch, visible))
        options = {"num_decodes": case.num_decodes, "scale": SCALE}
        attend = jax.jit(type(self).attend, static_argnames=tuple(options))
        found = attend(*arrays, **options)
        expected = reference.attend(case.q, case.pages, case.batch, visible, **options)
        for array, right in zip(found, expected):
            np.testing.assert_allclose(array, right, rtol=2e-5, atol=2e-5)

    def test_ids_outside_the_pool_read_nothing_outside_it(self):
        """What such a row gets is unspecified; others are as they were."""
        case = self.case([9, 30], [(17, 5)], page_size=4)
        before = self.run(case)
        case.batch.tables[1] = [-(2**31), 2**31 - 1] * (case.batch.tables.shape[1] // 2)
        for old, new in zip(before, self.run(case)):
            np.testing.assert_array_equal(np.delete(old, 1, 0), np.delete(new, 1, 0))

    def test_beyond_the_table_there_is_nothing_to_see(self):
        case = self.case([4, 30], [(3, 3)], page_size=4)
        case.batch = case.batch._replace(tables=case.batch.tables[:, :1])
        page_size = case.pages.k.shape[3]
        within = case.batch._replace(context=np.minimum(case.batch.context, page_size))
        right = reference.paged_attention(case.q, case.pages, within, num_decodes=2, scale=SCALE)
        close = {"rtol": self.tolerance, "atol": self.tolerance}
        for found, expected in zip(self.run(case), right):
            np.testing.assert_allclose(found.astype(np.float64), expected, **close)

    @pytest.mark.parametrize("num_decodes", [0, 2])
    @pytest.mark.parametrize("width", [0, 3])
    def test_tokens_after_the_last_row_belong_to_no_row(self, num_decodes, width):
        case = self.case([5, 9], page_size=4, padding=3)
        case.num_decodes = num_decodes
        case.batch = RaggedBatch(*(field[:num_decodes] for field in case.batch))
        self.check(case, tree_mask=np.ones((len(case.q), width), bool))

    def test_heads_that_do_not_divide_are_refused(self):
        with pytest.raises(ValueError, match="5 query heads cannot be shared evenly among 2"):
            self.run(self.case([4], page_size=4, heads=(5, 2)))


class TestXla(PagedAttentionContract):
    implementation = staticmethod(paged_attention)

    def test_two_features_in_a_byte(self):
        """Of 4 bits each, which no kernel reads."""
        case = self.case([5, 0, 40], [(20, 7), (4, 4)], page_size=4, padding=2)
        quantized = scaled(case.pages, jnp.int8)
        whole = [(array.astype(np.int32) // 16).clip(-7, 7) for array in quantized[:2]]
        keys = packed_int4(jnp.asarray(whole[0]).swapaxes(2, 3)).swapaxes(2, 3)
        case.pages = KVPages(np.asarray(keys), np.asarray(packed_int4(whole[1])), quantized.scales)
        assert [array.shape[axis] for array, axis in zip(case.pages, (2, 3))] == [4, 4]
        self.check(case)
        self.check(case, window=6, soft_cap=1.5)
        tree = np.tri(7, dtype=bool)[np.minimum(np.arange(len(case.q)) - 3, 6).clip(0)]
        tree[10:14] = np.tri(7, dtype=bool)[:4]
        self.check(case, tree_mask=tree)
        # By queries and results that are rotated, and keys and values as they lie there.
        plain = case.pages._replace(k=whole[0].astype(np.int8), v=whole[1].astype(np.int8))
        options = {"num_decodes": case.num_decodes, "scale": SCALE}
        found = reference.paged_attention(case.q, case.pages, case.batch, **options)
        out, lse = reference.paged_attention(rotated(case.q), plain, case.batch, **options)
        np.testing.assert_allclose(found[0], rotated(out), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found[1], lse, rtol=1e-5)

    attend = staticmethod(attend)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window is 0"),
        ({"soft_cap": -1.0}, "soft_cap is -1.0"),
        ({"sinks": np.zeros(3)}, r"sinks has shape \(3,\); it must be \(4,\)"),
        ({"k_scale": np.zeros(4)}, r"k_scale has shape \(4,\); it must be \(2,\)"),
        ({"tree_mask": np.zeros((3, 2), bool)}, r"tree_mask is bool \(3, 2\)"),
        ({"tree_mask": np.zeros((1, 2), int)}, r"tree_mask is int64 \(1, 2\); it must be bool"),
        (
            {"window": 4, "groups": DecodeGroups(*np.ones((3, 1), np.int32))},
            "window is 4; with groups of decodes it must be None",
        ),
        ({"scale": 0.0}, r"scale is 0.0; it must be positive"),
        ({"num_decodes": 9}, "num_decodes is 9; there are 1 tokens and 1 rows"),
        ({"backend": "cuda"}, "backend is 'cuda'; it can be auto, xla, pallas"),
    ],
)
def test_what_makes_no_sense_is_refused(change, message):
    case = Case([4], page_size=4)
    with pytest.raises(ValueError, match=message):
        paged_attention(
            case.q, case.pages, case.batch, **{"num_decodes": 1, "scale": SCALE} | change
        )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"k": np.zeros((4, 2, 8, 3)), "v": np.zeros((4, 2, 8, 3))}, "those of values must be"),
        ({"q": np.zeros((1, 4, 6))}, "head_dim 6 and keys 8"),
        ({"scales": np.zeros((5, 2, 2, 4))}, "Pages of float32 have scales; only int8 and float8"),
        (
            {"k": np.zeros((5, 2, 4, 4), np.uint8), "v": np.zeros((5, 2, 4, 4), np.uint8)},
            "Pages of uint8 have no scales; features of 4 bits need them",
        ),
        ({"k": np.zeros((5, 2, 8, 4), np.int16)}, "Keys are int16 and values float32; both must"),
        ({"q": np.zeros((1, 4, 8), np.int32)}, "Queries are int32"),
        ({"tables": np.zeros((1, 2))}, "tables is float64"),
        (
            {"tables": np.zeros((3, 2), int)},
            r"context is int32 \(1,\); it must be of integers, with 3",
        ),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(kind, message):
    case = Case([4], page_size=4)
    pages = case.pages._replace(**{name: kind[name] for name in KVPages._fields if name in kind})
    batch = case.batch._replace(tables=kind.get("tables", case.batch.tables))
    with pytest.raises(ValueError, match=message):
        paged_attention(kind.get("q", case.q), pages, batch, num_decodes=1, scale=SCALE)


def share(case, groups):
    """Let the decodes of each group, (first, decodes, shared pages), begin with the pages of the
    first that is no padding; poison the pages without an owner."""
    case.pages = jax.tree.map(np.array, case.pages)
    tables, page_size = case.batch.tables, case.pages.k.shape[3]
    for first, size, count in groups:
        rows = [row for row in range(first, first + size) if case.batch.context[row]]
        for row in rows:
            assert case.batch.context[row] >= count * page_size
            if row > rows[0]:
                freed = tables[row, :count].copy()
                for array in jax.tree.leaves(case.pages):
                    array[freed] = POISON
                tables[row, :count] = tables[rows[0], :count]


def decode_groups(case, groups, room):
    """`groups` as `share` takes them, with `room` for more."""
    starts, lengths, context = np.zeros((3, room), np.int32)
    starts[:] = case.num_decodes
    for index, (first, size, count) in enumerate(groups):
        starts[index], lengths[index] = first, size
        context[index] = count * case.pages.k.shape[3]
    return DecodeGroups(starts, lengths, context)


def widen(case, *, tokens, pages, table):
    """The same case in larger arrays, what is added being poison and padding."""
    grow = tokens - len(case.q)
    case.q = np.concatenate([case.q, np.ones((grow, *case.q.shape[1:]), np.float32)])
    more = pages - len(case.pages.k)
    case.pages = jax.tree.map(
        lambda array: np.concatenate(
            [array, np.full((more, *array.shape[1:]), POISON, np.float32)]
        ),
        case.pages,
    )
    columns = table - case.batch.tables.shape[1]
    tables = np.pad(case.batch.tables, ((0, 0), (0, columns)))
    case.batch = case.batch._replace(tables=tables)
    return case


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn])
def test_written_keys_and_values_lie_where_they_are_read(dtype):
    rng = np.random.default_rng(0)
    k, v = (10 * rng.normal(size=(2, 7, 2, 8))).round().astype(dtype)
    pages = KVPages(jnp.zeros((4, 2, 8, 3), dtype), jnp.zeros((4, 2, 3, 8), dtype))
    ids, offsets = np.array([3, 3, 1, 4, -1, 2, 2]), np.array([0, 2, 1, 0, 0, 3, -1])
    written = write_kv(pages, jnp.asarray(k), jnp.asarray(v), ids, offsets)
    keys, values = np.zeros((4, 2, 8, 3), dtype), np.zeros((4, 2, 3, 8), dtype)
    for token in range(3):  # the others are outside the pool
        keys[ids[token], :, :, offsets[token]] = k[token]
        values[ids[token], :, offsets[token], :] = v[token]
    np.testing.assert_array_equal(written.k, keys)
    np.testing.assert_array_equal(written.v, values)


def test_what_does_not_fit_the_pages_is_not_written():
    pages = KVPages(jnp.zeros((4, 2, 8, 3)), jnp.zeros((4, 2, 3, 8)))
    new, where = jnp.zeros((5, 2, 8)), jnp.zeros(5, jnp.int32)
    with pytest.raises(ValueError, match=r"k has shape \(5, 1, 8\); it must be \(5, 2, 8\)"):
        write_kv(pages, new[:, :1], new, where, where)
    with pytest.raises(ValueError, match=r"offsets has shape \(4,\); it must be \(5,\)"):
        write_kv(pages, new, new, where, where[:4])
    with pytest.raises(ValueError, match="those of values must be"):
        write_kv(pages._replace(v=pages.v[:3]), new, new, where, where)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
def test_a_donated_pool_is_written_in_place(dtype):
    pages = KVPages(*(jax.ShapeDtypeStruct((512, 2, 8, 8), dtype) for _ in "kv"))
    new = jax.ShapeDtypeStruct((5, 2, 8), dtype)
    where = jax.ShapeDtypeStruct((5,), jnp.int32)
    program = jax.jit(write_kv, donate_argnums=0).lower(pages, new, new, where, where).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * 512 * 2 * 8 * 8 * jnp.dtype(dtype).itemsize
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 10


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn])
def test_a_pool_is_not_copied_to_be_read(dtype):
    """XLA on CPUs converts small floats, which must be those that are read and no others."""

    def step(pages, new, where, q, batch):
        pages = write_kv(pages, new, new, where, where)
        return pages, paged_attention(q, pages, batch, num_decodes=4, scale=0.3)

    pages = KVPages(*(jax.ShapeDtypeStruct((4096, 2, 8, 8), dtype) for _ in "kv"))
    activations = dtype if dtype != jnp.float8_e4m3fn else jnp.bfloat16
    new, q = (jax.ShapeDtypeStruct((4, heads, 8), activations) for heads in (2, 4))
    where, tables = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4,), (4, 8)))
    batch = RaggedBatch(tables, where, where, where)
    program = jax.jit(step, donate_argnums=0).lower(pages, new, where, q, batch).compile()
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes / 10


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_what_is_written_to_quantized_pages_is_rounded_and_limited(dtype):
    k = jnp.float32([[[1.26, -0.63], [1e9, -1e9]]])
    pages = KVPages(jnp.zeros((2, 2, 2, 1), dtype), jnp.zeros((2, 2, 1, 2), dtype))
    where = jnp.int32([1]), jnp.int32([0])
    scale = jnp.float32([0.5, 2])
    written = write_kv(pages, k, k, *where, k_scale=scale, v_scale=scale)
    largest = 127 if dtype == jnp.int8 else 448
    nearest = [3, -1] if dtype == jnp.int8 else [2.5, -1.25]
    expected = np.float32([nearest, [largest, -largest]])
    np.testing.assert_array_equal(written.k[1, :, :, 0].astype(np.float32), expected)
    np.testing.assert_array_equal(written.v[1, :, 0].astype(np.float32), expected)


@pytest.mark.parametrize("rows", [{"decodes": [200]}, {"decodes": [], "chunks": [(200, 1)]}])
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_small_weights_of_small_values_count_in_float16(dtype, rows):
    """Whose products are below its least number: here of all tokens but the first, of no value."""
    case = Case(page_size=4, poison=0, **rows)
    first, (num_pages, kv_heads, dim, page_size) = case.batch.tables[0, 0], case.pages.k.shape
    k, v = (np.zeros(array.shape, np.float32) for array in (case.pages.k, case.pages.v))
    k[first, :, :, 0], v[...], v[first, :, 0] = 100, 100, 0
    case.q = np.ones(case.q.shape, np.float16)
    scales = np.full((num_pages, kv_heads, 2, page_size), 1e-4, np.float32)
    scales[:, :, 0] = 10 / (100 * dim * SCALE)  # The first has a score of 10, the others of 0.
    case.pages = KVPages(k.astype(dtype), v.astype(dtype), scales)
    arrays = jax.tree.map(jnp.asarray, (case.q, case.pages, case.batch))
    options = {"num_decodes": case.num_decodes, "scale": SCALE}
    out, _ = paged_attention(*arrays, **options)
    expected, _ = reference.paged_attention(case.q, case.pages, case.batch, **options)
    assert expected.min() > 8e-5
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, rtol=1e-2)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "uint8"])
def test_every_token_and_head_is_written_with_scales_of_its_own(dtype):
    """So what is written next to it changes nothing of it; a token of zeros stays zero."""
    rng = np.random.default_rng(0)
    k, v = (rng.normal(size=(2, 5, 2, 8)) * [[[1e-3]], [[1.0]], [[1e3]], [[0]], [[1.0]]]).astype(
        np.float32
    )
    ids, offsets = np.int32([3, 3, 1, 2, 4]), np.int32([0, 2, 1, 0, 0])  # the last is outside
    pages = jax.tree.map(
        lambda array: jnp.zeros(array.shape, array.dtype),
        PageLayout(4, 3, 2, 8, jnp.dtype(dtype), scaled=True).shapes,
    )
    write = jax.jit(write_kv)
    together = write(pages, jnp.asarray(k), jnp.asarray(v), ids, offsets)
    for token in range(5):
        few = slice(token, token + 1)
        pages = write(pages, jnp.asarray(k[few]), jnp.asarray(v[few]), ids[few], offsets[few])
    for one, other in zip(pages, together):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    largest = {"int8": 127, "float8_e4m3fn": 448, "uint8": 7}[dtype]
    for which, values in enumerate((k, v)):
        if dtype == "uint8":
            values = np.asarray(rotated(values))
        for token in range(4):
            peak = np.maximum(np.abs(values[token]).max(axis=1), 1e-30)
            scale = np.asarray(together.scales[ids[token], :, which, offsets[token]])
            np.testing.assert_allclose(scale, peak / largest, rtol=1e-6)
            elements = values[token] / scale[:, None]
            elements = elements if dtype == "float8_e4m3fn" else np.round(elements)
            place = ids[token], slice(None), offsets[token]
            found = (together.k.swapaxes(2, 3), together.v)[which][place]
            stored = np.dtype("int8" if dtype == "uint8" else dtype)
            if dtype == "uint8":
                found = unpacked_int4(found, -1)
            np.testing.assert_array_equal(found, elements.clip(-largest, largest).astype(stored))
    with pytest.raises(ValueError, match="have scales of their own, so k_scale and v_scale must"):
        write_kv(pages, k, v, ids, offsets, k_scale=jnp.ones(2))


@pytest.mark.parametrize("dim", [2, 12, 64, 80])
def test_a_rotation_is_its_own_inverse_and_leaves_scores(dim):
    q, k = np.random.default_rng(0).normal(size=(2, 5, dim)).astype(np.float32)
    np.testing.assert_allclose(rotated(rotated(q)), q, atol=1e-5)
    np.testing.assert_allclose(rotated(q) @ rotated(k).T, q @ k.T, atol=1e-4)
    peak = np.abs(rotated(np.eye(dim))).max()
    assert peak == pytest.approx((dim & -dim) ** -0.5)
