"""One contract for every implementation of moving pages, against numpy, to the last bit."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.page_copy import (
    copy_pages,
    gather_pages,
    reference,
    row_dtype,
    row_elements,
    scatter_pages,
    xla,
)
from pallas_kernels.paged_attention import KVPages, PageLayout

PAGES, LAYERS, IDS = 7, 2, 4
OUTSIDE = (-(2**31), -PAGES - 1, -PAGES, -1, PAGES, PAGES + 1, 2**31 - 1)
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8")
SCALED = ("scaled int8", "scaled float8_e4m3fn")
"""Elements with scales of another dtype: rows of bytes."""

sources = st.lists(
    st.one_of(st.integers(0, PAGES - 1), st.sampled_from(OUTSIDE)), min_size=IDS, max_size=IDS
).map(np.int32)
"""Any ids, some twice, some of no page."""


@st.composite
def targets(draw):
    """Ids none of which repeats, but for the trash page and what lies outside the pool."""
    pages = draw(st.permutations(range(1, PAGES)))[:IDS]
    nowhere = draw(st.lists(st.sampled_from((None, None, 0, *OUTSIDE)), min_size=IDS, max_size=IDS))
    return np.int32([page if other is None else other for page, other in zip(pages, nowhere)])


def layout(dtype, num_pages=PAGES, page_size=6, heads=2, head_dim=4):
    """Pages whose keys and values are laid out differently."""
    *scaled, dtype = dtype.split()
    return PageLayout(num_pages, page_size, heads, head_dim, jnp.dtype(dtype), bool(scaled))


def random_bits(shape, dtype, rng):
    """Any bits at all: among floats, NaNs of every payload."""
    return np.frombuffer(rng.bytes(math.prod(shape) * dtype.itemsize), dtype).reshape(shape)


def without_payloads(arrays):
    """Every NaN alike: the simulator of races may lose payloads, for on some CPUs JAX 0.10.2 moves
    bfloat16 through float32.
    """
    nan = functools.partial(np.full, (), np.nan)
    return jax.tree.map(lambda bits: np.where(bits == bits, bits, nan(bits.dtype)), arrays)


def pool(dtype, seed=0, **kind):
    """Layers of KVPages of random bits, as numpy."""
    rng, shapes = np.random.default_rng(seed), layout(dtype, **kind).shapes
    return [
        jax.tree.map(lambda like: random_bits(like.shape, like.dtype, rng), shapes)
        for _ in range(LAYERS)
    ]


def assert_same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    np.testing.assert_array_equal(
        np.ascontiguousarray(actual).view(np.uint8), np.ascontiguousarray(expected).view(np.uint8)
    )


def assert_same_pages(actual, expected, first=0):
    """From page `first` on; 1 leaves out the trash page, where writers may race."""
    assert len(actual) == len(expected)
    for left, right in zip(actual, expected):
        for one, other in zip(*map(jax.tree.leaves, (left, right))):
            assert_same_bits(np.asarray(one)[first:], other[first:])


class PageCopyContract:
    """What the three functions, with the signatures of the api, must do."""

    gather = scatter = copy = None
    dtypes = DTYPES

    @classmethod
    @functools.cache
    def jitted(cls, name):
        donated = () if name == "gather" else 0
        return jax.jit(getattr(cls, name), donate_argnums=donated)

    def run(self, name, layers, *arguments):
        return self.jitted(name)(*jax.tree.map(jnp.asarray, (layers, *arguments)))

    @settings(max_examples=15, deadline=None)
    @given(page_ids=sources, data=st.data())
    def test_gather(self, page_ids, data):
        layers = pool(data.draw(st.sampled_from(self.dtypes)))
        staging = self.run("gather", layers, page_ids)
        assert_same_bits(staging, reference.gather_pages(layers, page_ids))

    @settings(max_examples=15, deadline=None)
    @given(page_ids=targets(), data=st.data())
    def test_scatter(self, page_ids, data):
        layers = pool(data.draw(st.sampled_from(self.dtypes)))
        shape = (IDS, row_elements(layers))
        staging = random_bits(shape, row_dtype(layers), np.random.default_rng(1))
        written = self.run("scatter", layers, page_ids, staging)
        trash = int(np.sum(page_ids == 0) > 1)
        assert_same_pages(written, reference.scatter_pages(layers, page_ids, staging), trash)

    @settings(max_examples=15, deadline=None)
    @given(source_ids=sources, target_ids=targets(), data=st.data())
    def test_copy(self, source_ids, target_ids, data):
        layers = pool(data.draw(st.sampled_from(self.dtypes)))
        copied = self.run("copy", layers, source_ids, target_ids)
        trash = int(np.sum(target_ids == 0) > 1)
        assert_same_pages(copied, reference.copy_pages(layers, source_ids, target_ids), trash)

    def test_a_page_may_be_both_source_and_target(self):
        """A rotation: done one after the other, one page would end up everywhere."""
        layers = pool(self.dtypes[0])
        ring = np.int32([1, 2, 3, 4])
        copied = self.run("copy", layers, ring, np.roll(ring, -1))
        for before, after in zip(layers, copied):
            for old, new in zip(*map(jax.tree.leaves, (before, after))):
                assert_same_bits(np.asarray(new)[[2, 3, 4, 1]], old[ring])
                assert_same_bits(np.asarray(new)[[0, 5, 6]], old[[0, 5, 6]])

    def test_a_gathered_page_can_be_put_elsewhere(self):
        """Keys and values of all layers, padded at both ends with the trash page."""
        for dtype in self.dtypes:
            layers = pool(dtype)
            staging = self.run("gather", layers, np.int32([5, 2, 0, 0]))
            moved = self.run("scatter", pool(dtype, seed=1), np.int32([3, 6, 0, 0]), staging)
            for before, after in zip(layers, moved):
                for old, new in zip(*map(jax.tree.leaves, (before, after))):
                    assert_same_bits(np.asarray(new)[[3, 6, 0]], old[[5, 2, 0]])

    def test_nothing_is_moved_by_ids_outside_the_pool(self):
        nowhere = np.int32([-1, -PAGES, PAGES, 2**31 - 1])
        for dtype in self.dtypes:
            layers = pool(dtype)
            assert not np.asarray(self.run("gather", layers, nowhere)).view(np.uint8).any()
            staging = self.run("gather", layers, np.int32([1, 2, 3, 4]))
            assert_same_pages(self.run("scatter", layers, nowhere, staging), layers)
            for pair in ((nowhere, np.int32([1, 2, 3, 4])), (np.int32([1, 2, 3, 4]), nowhere)):
                assert_same_pages(self.run("copy", layers, *pair), layers)


class TestXla(PageCopyContract):
    dtypes = (*DTYPES, *SCALED)
    gather = staticmethod(gather_pages)
    scatter = staticmethod(scatter_pages)
    copy = staticmethod(copy_pages)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_the_pool_stays_where_it_is(self, dtype):
        """Donated pages are updated in place; other memory is needed for the pages moved only."""
        pages = layout(dtype, num_pages=64, page_size=256)
        layers = [pages.shapes] * LAYERS
        pool_bytes = LAYERS * pages.num_pages * pages.page_bytes
        whole_page_bytes = LAYERS * pages.page_bytes
        ids = jax.ShapeDtypeStruct((IDS,), jnp.int32)
        staging = jax.ShapeDtypeStruct((IDS, row_elements(layers)), pages.dtype)
        for name, arguments in (("scatter", (ids, staging)), ("copy", (ids, ids))):
            memory = self.jitted(name).lower(layers, *arguments).compile().memory_analysis()
            assert memory.alias_size_in_bytes == pool_bytes
            assert memory.temp_size_in_bytes < (IDS + 2) * whole_page_bytes < pool_bytes


@settings(max_examples=15, deadline=None)
@given(
    source_ids=sources, target_ids=targets(), dtype=st.sampled_from(("float32", "int8", SCALED[0]))
)
def test_array_by_array_means_the_same(source_ids, target_ids, dtype):
    """What accelerators run; not in bfloat16, which they have and CPUs only emulate."""
    layers = pool(dtype)
    arrays, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, layers))
    staging = jax.jit(xla.gather_by_array)(arrays, source_ids)
    expected = reference.gather_pages(layers, source_ids)
    assert_same_bits(staging, expected)
    written = jax.jit(xla.scatter_by_array)(arrays, target_ids, staging)
    written = jax.tree.unflatten(structure, written)
    trash = int(np.sum(target_ids == 0) > 1)
    assert_same_pages(written, reference.scatter_pages(layers, target_ids, expected), trash)


def test_a_row_has_the_elements_of_one_page_of_every_layer():
    assert row_elements([layout("float32").shapes] * 3) == 3 * 2 * (2 * 4 * 6)
    scaled = [layout("scaled int8").shapes] * 3
    assert row_dtype(scaled) == np.uint8
    assert row_elements(scaled) == 3 * (2 * (2 * 4 * 6) + 2 * 2 * 6 * 4)


def test_what_does_not_fit_is_refused():
    layers = jax.tree.map(jnp.asarray, pool("float32"))
    ids = jnp.zeros(IDS, jnp.int32)
    size = row_elements(layers)
    with pytest.raises(ValueError, match=rf"shape \(3, {size}\); 4 page ids of 2 layers need"):
        scatter_pages(layers, ids, jnp.zeros((3, size)))
    with pytest.raises(ValueError, match="staging is float16; it must be float32"):
        scatter_pages(layers, ids, jnp.zeros((IDS, size), jnp.float16))
    with pytest.raises(ValueError, match="4 sources cannot be copied to 2 targets"):
        copy_pages(layers, ids, ids[:2])


def test_layers_that_differ_and_nothing_to_move_are_refused():
    """A page that one layer has and another has not is outside a pool."""
    ids = jnp.int32([1])
    few, many = (KVPages(jnp.zeros((n, 1, 4, 4)), jnp.zeros((n, 1, 4, 4))) for n in (3, 5))
    half = jax.tree.map(lambda array: array.astype(jnp.bfloat16), many)
    for layers in ([few, many], [many, half], []):
        with pytest.raises(ValueError, match="all must have as many of the same dtype"):
            gather_pages(layers, ids)
        with pytest.raises(ValueError, match="all must have as many of the same dtype"):
            copy_pages(layers, ids, ids)
    with pytest.raises(ValueError, match=r"page ids have shape \(0,\); there must be one"):
        gather_pages([many], ids[:0])
