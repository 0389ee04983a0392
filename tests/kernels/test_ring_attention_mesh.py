"""Attention over sequences held by 2, 4 and 8 devices is attention over whole sequences."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from scripts import on_eight_devices
from unoptimised import UNOPTIMISED

from pallas_kernels.paged_attention import KVPages, RaggedBatch, write_kv
from pallas_kernels.ring_attention import (
    contiguous,
    kvp_attention,
    kvp_slots,
    ring_attention,
    ring_paged_attention,
    round_robin,
    zigzag,
)
from pallas_kernels.ring_attention.reference import attention as reference

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 8, 0.3
ROWS, SHARD = 2, 140
"""Of whole sequences: rows, and tokens of each that a rank has room for, in two pages."""
PAGE_SIZE, WIDTH = 4, 6
"""Of pages in a pool, and how many of them a rank may have of a row."""


def compiled(function, ranks, in_specs, out_specs, *arguments):
    """`function` compiled for as many devices along the axis "seq"; arguments give the shapes."""
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("seq",))
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    return jax.jit(mapped).lower(*arguments).compile(compiler_options=UNOPTIMISED)


def sends(program):
    """Shape and number of all sends of a program, which has no other collectives."""
    text = program.as_text()
    assert not re.search(r"all-gather|all-reduce|all-to-all|reduce-scatter", text)
    found = re.findall(r"f32\[([\d,]+)\]\S* collective-permute\(", text)
    return {shape: found.count(shape) for shape in found}


def random_sequences(seed, lengths):
    """q, k, v of each sequence, float32 [length, heads, head_dim]."""
    rng = np.random.default_rng(seed)
    shapes = [(HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM)]
    return [
        [rng.normal(size=(length, *shape)).astype(np.float32) for shape in shapes]
        for length in lengths
    ]


def sharded(arrays, order):
    """[rows, ranks * shard, ...]: each row's array in that order, NaN where it has ended."""
    result = np.full((*order.shape, *arrays[0].shape[1:]), np.nan, np.float32)
    for row, array in enumerate(arrays):
        inside = order[row] < len(array)
        result[row, inside] = array[order[row, inside]]
    return result


def assert_sharded(actual, expected, order, tolerance=2e-5):
    """out and lse of each row are the expected ones on their shards; padding has nothing."""
    for row, results in enumerate(expected):
        inside = order[row] < len(results[0])
        for got, wanted, empty in zip(actual, results, (0, -np.inf)):
            got = np.asarray(got[row], np.float64)
            np.testing.assert_allclose(
                got[inside], wanted[order[row, inside]], rtol=tolerance, atol=tolerance
            )
            np.testing.assert_array_equal(got[~inside], empty)


class Whole:
    """Whole sequences on `ranks` devices: one program for whatever lengths."""

    def __init__(self, ranks, sharding, scheme, dtype=jnp.float32, backend="auto", **options):
        self.ranks, self.sharding, self.options, self.dtype = ranks, sharding, options, dtype

        def local(q, k, v, lengths):
            return ring_attention(
                q,
                k,
                v,
                lengths,
                sharding(lengths, ranks),
                axis_name="seq",
                scale=SCALE,
                scheme=scheme,
                backend=backend,
                **options,
            )

        shapes = [
            jax.ShapeDtypeStruct((ROWS, ranks * SHARD, heads, DIM), dtype)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]
        shapes.append(jax.ShapeDtypeStruct((ROWS,), jnp.int32))
        split = P(None, "seq")
        self.program = compiled(local, ranks, (split, split, split, P()), split, *shapes)

    def run(self, sequences):
        """out and lse as sharded, and the order in which that is."""
        lengths = np.int32([len(q) for q, _, _ in sequences])
        order = self.sharding(lengths, self.ranks).order(SHARD)
        order = np.broadcast_to(order, (ROWS, self.ranks * SHARD))
        arrays = [jnp.asarray(sharded(one, order), self.dtype) for one in zip(*sequences)]
        return self.program(*arrays, lengths), order

    def check(self, sequences, tolerance=2e-5):
        actual, order = self.run(sequences)
        assert actual[0].dtype == self.dtype and actual[1].dtype == jnp.float32
        expected = [reference(*one, scale=SCALE, **self.options) for one in sequences]
        assert_sharded(actual, expected, order, tolerance)

    def check_any_lengths(self):
        """None, one, a share that is not full, pages that are, and everything there is room for."""
        most = self.ranks * SHARD

        @settings(max_examples=6, deadline=None, derandomize=True)
        @given(st.tuples(*[st.integers(0, most)] * ROWS))
        @example((0, 1))
        @example((most, most - 1))
        @example((self.ranks * 128, self.ranks * 2 + 1))
        def check(lengths):
            self.check(random_sequences(sum(lengths), lengths))

        check()


@pytest.mark.meshes
@on_eight_devices
def test_keys_and_values_around_eight_ranks():
    ring = Whole(8, zigzag, "pass_kv")
    assert sends(ring.program) == {
        f"{2 * ROWS},{KV_HEADS},{DIM},128": 7,
        f"{2 * ROWS},{KV_HEADS},128,{DIM}": 7,
    }
    ring.check_any_lengths()

    sequences = random_sequences(0, (1000, 333))
    together, _ = ring.run(sequences)
    alone, _ = ring.run([sequences[0], *random_sequences(0, [7])])
    for one, other in zip(together, alone):
        np.testing.assert_array_equal(one[0], other[0], "a row depends on its neighbours")


@pytest.mark.meshes
@on_eight_devices
def test_keys_and_values_both_ways_in_messages_half_as_large():
    ring = Whole(4, zigzag, "pass_kv_both_ways", window=50)
    assert sends(ring.program) == {
        f"{ROWS},{KV_HEADS},{DIM},128": 2 * 3,
        f"{ROWS},{KV_HEADS},128,{DIM}": 2 * 3,
    }
    ring.check_any_lengths()


@on_eight_devices
def test_queries_one_way_and_results_the_other():
    ring = Whole(4, contiguous, "pass_q", soft_cap=5.0)
    tokens = ROWS * SHARD
    assert sends(ring.program) == {
        f"{tokens},{HEADS},{DIM}": 3 + 3,
        f"{tokens},{HEADS}": 3,
    }
    ring.check_any_lengths()


@pytest.mark.parametrize("scheme", ["pass_kv", "pass_kv_both_ways", "pass_q"])
@on_eight_devices
def test_two_ranks_that_see_everything(scheme):
    Whole(2, zigzag, scheme, causal=False).check_any_lengths()


@pytest.mark.interpreted
@pytest.mark.parametrize("scheme", ["pass_kv", "pass_kv_both_ways", "pass_q"])
@on_eight_devices
def test_a_kernel_attends_within(scheme):
    Whole(2, zigzag, scheme, backend="pallas", window=60).check(random_sequences(0, (200, 77)))


@on_eight_devices
def test_half_precision():
    """Parts are rounded once each and summed in float32."""
    ring = Whole(4, lambda _, ranks: round_robin(20, ranks), "pass_kv", jnp.bfloat16)
    sequences = random_sequences(0, (500, 77))
    rounded = [
        [np.asarray(jnp.asarray(array, jnp.bfloat16), np.float32) for array in one]
        for one in sequences
    ]
    ring.check(rounded, tolerance=4 * float(jnp.finfo(jnp.bfloat16).eps))


def test_what_does_not_belong_together_is_refused():
    """On the one device of this process."""

    def attend(q_shape=(2, 6, 4, 8), k_shape=(2, 6, 2, 8), ranks=1, **options):
        def local(q, k):
            layout = zigzag(jnp.zeros(2, jnp.int32), ranks)
            lengths = jnp.zeros(2, jnp.int32)
            return ring_attention(q, k, k, lengths, layout, axis_name="seq", scale=SCALE, **options)

        q, k = jnp.zeros((1, *q_shape)), jnp.zeros((1, *k_shape))
        return jax.vmap(local, axis_name="seq")(q, k)

    with pytest.raises(ValueError, match=r"k has shape \(2, 5, 2, 8\) .* \(2, 6, kv_heads, 8\)"):
        attend(k_shape=(2, 5, 2, 8))
    with pytest.raises(ValueError, match="4 query heads cannot be shared evenly among 3"):
        attend(k_shape=(2, 6, 3, 8))
    with pytest.raises(ValueError, match="is for 2 ranks; axis 'seq' has 1"):
        attend(ranks=2)
    with pytest.raises(ValueError, match="scheme is 'pass_v'; it can be pass_kv, "):
        attend(scheme="pass_v")
    for options in ({"window": 0}, {"window": 3, "causal": False}):
        with pytest.raises(ValueError, match=r"window is \d; it must be at least 1"):
            attend(**options)


def pools(seed, keys_and_values, ranks):
    """Every rank's pool and tables, with page j of each row on rank j % ranks.

    k [ranks, pages, ...], v alike, NaN where nothing was written, and tables [ranks, rows, WIDTH].
    """
    rng = np.random.default_rng(seed)
    rows = len(keys_and_values)
    num_pages = 1 + rows * WIDTH
    k = np.full((ranks, num_pages, KV_HEADS, DIM, PAGE_SIZE), np.nan, np.float32)
    v = np.full((ranks, num_pages, KV_HEADS, PAGE_SIZE, DIM), np.nan, np.float32)
    ids = [1 + rng.permutation(num_pages - 1).reshape(rows, WIDTH) for _ in range(ranks)]
    for row, (keys, values) in enumerate(keys_and_values):
        for position, (key, value) in enumerate(zip(keys, values)):
            page, offset = divmod(position, PAGE_SIZE)
            rank, page = page % ranks, page // ranks
            k[rank, ids[rank][row, page], :, :, offset] = key
            v[rank, ids[rank][row, page], :, offset, :] = value
    return KVPages(k, v), np.int32(ids)


def shapes_of(tree):
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), tree)


@pytest.mark.parametrize("scheme", ["pass_kv", "pass_kv_both_ways", "pass_q"])
@on_eight_devices
def test_a_chunk_after_a_cached_context(scheme):
    """New tokens zigzag over the ranks, everything that they see a page at a time."""
    ranks, shard, most = 4, 6, 4 * WIDTH * PAGE_SIZE

    def local(q, pages, tables, context, lengths):
        pages, tables = jax.tree.map(lambda array: array[0], (pages, tables))
        return ring_paged_attention(
            q,
            pages,
            tables,
            context,
            lengths,
            zigzag(lengths, ranks),
            axis_name="seq",
            scale=SCALE,
            window=31,
            scheme=scheme,
        )

    split, stacked = P(None, "seq"), P("seq")
    empty = pools(0, [([], [])] * ROWS, ranks)
    q = jax.ShapeDtypeStruct((ROWS, ranks * shard, HEADS, DIM), jnp.float32)
    ints = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    specs = (split, stacked, stacked, P(), P())
    program = compiled(local, ranks, specs, split, q, *shapes_of(empty), ints, ints)

    @settings(max_examples=6, deadline=None, derandomize=True)
    @given(
        st.tuples(*[st.integers(0, most - ranks * shard)] * ROWS),
        st.tuples(*[st.integers(0, ranks * shard)] * ROWS),
    )
    @example((0, most - ranks * shard), (1, ranks * shard))
    @example((3, 0), (5, 0))
    def check(cached, new):
        lengths, context = np.int32(new), np.int32(new) + np.int32(cached)
        sequences = random_sequences(sum(new), context)
        sequences = [(q[len(q) - n :], k, v) for (q, k, v), n in zip(sequences, new)]
        pages, tables = pools(0, [one[1:] for one in sequences], ranks)
        order = zigzag(lengths, ranks).order(shard)
        q = sharded([one[0] for one in sequences], order)
        actual = program(q, pages, tables, context, lengths)
        expected = [reference(*one, scale=SCALE, window=31) for one in sequences]
        assert_sharded(actual, expected, order)

    check()


@pytest.mark.parametrize(("ranks", "options"), [(4, {"window": 21}), (8, {"soft_cap": 5.0})])
@on_eight_devices
def test_queries_on_every_rank(ranks, options):
    """Two decodes and two chunks of up to 9 tokens, over pages; short rows leave ranks empty."""
    room, most = 9, ranks * WIDTH * PAGE_SIZE
    tokens = 2 + 2 * room

    def local(q, pages, batch, tables):
        pages, tables = jax.tree.map(lambda array: array[0], (pages, tables))
        return kvp_attention(
            q,
            pages,
            batch._replace(tables=tables),
            axis_name="seq",
            num_decodes=2,
            scale=SCALE,
            **options,
        )

    empty, tables = pools(0, [([], [])] * 4, ranks)
    q = np.zeros((tokens, HEADS, DIM), np.float32)
    ints = np.zeros(4, np.int32)
    specs = (P(), P("seq"), P(), P("seq"))
    batch = RaggedBatch(tables[0], ints, ints, ints)
    program = compiled(local, ranks, specs, P(), *shapes_of((q, empty, batch, tables)))
    assert not re.search(r"collective-permute|all-gather", program.as_text())

    @settings(max_examples=8, deadline=None, derandomize=True)
    @given(
        st.tuples(*[st.integers(0, most)] * 2, *[st.integers(1, most)] * 2),
        st.tuples(*[st.integers(1, room)] * 2),
    )
    @example((1, 0, 1, PAGE_SIZE + 1), (1, 2))
    @example((most, PAGE_SIZE, most, ranks * PAGE_SIZE + 2), (room, 4))
    def check(contexts, news):
        news = [1, 1, *(min(new, context) for new, context in zip(news, contexts[2:]))]
        sequences = random_sequences(sum(contexts), contexts)
        pages, tables = pools(1, [one[1:] for one in sequences], ranks)
        starts = np.cumsum([0, *news[:-1]])
        q = np.full((tokens, HEADS, DIM), 1e3, np.float32)
        expected = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
        for (queries, k, v), start, new in zip(sequences, starts, news):
            if len(k):
                q[start : start + new] = queries[len(k) - new :]
                parts = reference(q[start : start + new], k, v, scale=SCALE, **options)
                for whole, part in zip(expected, parts):
                    whole[start : start + new] = part
        batch = RaggedBatch(tables[0], *map(np.int32, (contexts, starts, news)))
        for got, wanted in zip(program(q, pages, batch, tables), expected):
            np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-5)

    check()


@on_eight_devices
def test_a_sequence_grows_from_rank_to_rank():
    """Token by token, written by the one rank whose page it falls into, and attended to by all."""
    ranks, most = 4, 4 * PAGE_SIZE * 2 + 3

    def local(q, k, v, pages, tables, context):
        pages, tables = jax.tree.map(lambda array: array[0], (pages, tables))
        rows = jnp.arange(2)
        slots = kvp_slots(tables, rows, context - 1, page_size=PAGE_SIZE, axis_name="seq")
        pages = write_kv(pages, k, v, *slots)
        batch = RaggedBatch(tables, context, rows, jnp.ones(2, jnp.int32))
        results = kvp_attention(q, pages, batch, axis_name="seq", num_decodes=2, scale=SCALE)
        return results, jax.tree.map(lambda array: array[None], pages)

    sequences = random_sequences(0, [most, most])
    q, k, v = (np.stack(arrays) for arrays in zip(*sequences))
    pages, tables = pools(0, [([], [])] * 2, ranks)
    context = np.int32([1, 1])
    specs = (P(), P(), P(), P("seq"), P("seq"), P())
    arguments = q[:, 0], k[:, 0], v[:, 0], pages, tables, context
    program = compiled(local, ranks, specs, (P(), P("seq")), *shapes_of(arguments))
    for length in range(1, most + 1):
        now = length - 1
        (out, lse), pages = program(
            q[:, now], k[:, now], v[:, now], pages, tables, np.int32([length] * 2)
        )
        written = np.isfinite(np.asarray(pages.k)[:, :, 0, 0]).sum(axis=(1, 2))
        assert written.sum() == 2 * length and written.max() - written.min() <= 2 * PAGE_SIZE
        for row in range(2):
            wanted = reference(q[row, now:length], k[row, :length], v[row, :length], scale=SCALE)
            np.testing.assert_allclose(out[row], wanted[0][0], rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(lse[row], wanted[1][0], rtol=2e-5, atol=2e-5)


@pytest.mark.meshes
@on_eight_devices
def test_ranks_along_two_axes_of_a_mesh():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("host", "chip"))
    axes, sequences = ("host", "chip"), random_sequences(0, (300, 41))
    lengths = np.int32([300, 41])
    order = zigzag(lengths, 8).order(SHARD)

    def local(q, k, v):
        layout = zigzag(jnp.asarray(lengths), 8)
        return ring_attention(
            q, k, v, jnp.asarray(lengths), layout, axis_name=axes, scale=SCALE, scheme="pass_kv"
        )

    split = P(None, axes)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    arrays = [sharded(one, order) for one in zip(*sequences)]
    program = jax.jit(mapped).lower(*arrays).compile(compiler_options=UNOPTIMISED)
    expected = [reference(*one, scale=SCALE) for one in sequences]
    assert_sharded(program(*arrays), expected, order)
