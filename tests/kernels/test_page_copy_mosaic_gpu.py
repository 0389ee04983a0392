"""The Hopper kernels that move pages, interpreted on the host with races detected, against numpy.

The interpreter compiles in every call, so there are few calls, each with ids of every kind.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_page_copy import PAGES, assert_same_bits, assert_same_pages, layout, pool, random_bits

from pallas_kernels.compat import GPU_KERNELS_WRITE_IN_PLACE
from pallas_kernels.compat import gpu as compat
from pallas_kernels.page_copy import mosaic_gpu, reference, row_elements

pytestmark = [pytest.mark.interpreted, pytest.mark.oldest_jax]

ONE_SLAB = {"heads": 2, "head_dim": 64, "page_size": 8}
SEVERAL_SLABS = {"heads": 3, "head_dim": 64, "page_size": 96}
"""Three a page in bfloat16; a block of threads goes several times around its ring."""

MIXED = np.int32([-1, 5, PAGES, 2, -(2**31), 6, 0, 2**31 - 1])

writes_in_place = pytest.mark.skipif(
    not GPU_KERNELS_WRITE_IN_PLACE, reason="needs JAX 0.11 or newer"
)


@pytest.fixture(autouse=True)
def two_multiprocessors(monkeypatch):
    monkeypatch.setattr(compat, "num_sms", lambda: 2)


def run(function, *arguments):
    with compat.gpu_interpreter(detect_races=True) as interpreter:
        program = jax.jit(lambda *arguments: function(*arguments, interpret=interpreter))
        return jax.tree.map(np.asarray, program(*jax.tree.map(jnp.asarray, arguments)))


def staged_rows(layers, count):
    return random_bits((count, row_elements(layers)), layers[0].k.dtype, np.random.default_rng(1))


KINDS = [
    ("bfloat16", SEVERAL_SLABS),
    ("float32", ONE_SLAB),
    ("float16", ONE_SLAB),
    ("float8_e4m3fn", ONE_SLAB),
    ("int8", ONE_SLAB),
]


@pytest.mark.parametrize(("dtype", "kind"), KINDS)
def test_gather(dtype, kind):
    """Including the same page twice."""
    layers, ids = pool(dtype, **kind), np.append(MIXED, np.int32(5))
    staging = run(mosaic_gpu.gather_pages, layers, ids)
    assert_same_bits(staging, reference.gather_pages(layers, ids))


@writes_in_place
@pytest.mark.parametrize(("dtype", "kind"), KINDS)
def test_scatter(dtype, kind):
    layers = pool(dtype, **kind)
    staging = staged_rows(layers, len(MIXED))
    written = run(mosaic_gpu.scatter_pages, layers, MIXED, staging)
    assert_same_pages(written, reference.scatter_pages(layers, MIXED, staging))


@writes_in_place
def test_places_are_used_again_only_when_stores_are_done():
    """Dropped rows between others: fewer stores than loads could be counted by."""
    layers = pool("bfloat16", **SEVERAL_SLABS)
    ids = np.int32([1, -1, 2, 3, -1, -1, 4, 5, 6])
    staging = staged_rows(layers, len(ids))
    written = run(mosaic_gpu.scatter_pages, layers, ids, staging)
    assert_same_pages(written, reference.scatter_pages(layers, ids, staging))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([layout("int16", **ONE_SLAB)], "pages are int16; they can be one of float32, bfloat16"),
        (
            [layout("int8", **ONE_SLAB), layout("float16", **ONE_SLAB)],
            "pages are float16, int8; they can be one of",
        ),
        ([layout("float32")], "192 bytes a page; all must have the same multiple of 1024"),
        (
            [layout("float32", **ONE_SLAB), layout("float32", **SEVERAL_SLABS)],
            "4096, 73728 bytes a page",
        ),
    ],
)
def test_what_the_kernels_cannot_do_is_refused(layers, message):
    layers = [pages.shapes for pages in layers]
    ids = jax.ShapeDtypeStruct((3,), jnp.int32)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mosaic_gpu.gather_pages, layers, ids)


@pytest.mark.skipif(GPU_KERNELS_WRITE_IN_PLACE, reason="needs JAX older than 0.11")
def test_writing_in_place_is_refused_by_versions_that_cannot():
    layers = [layout("float32", **ONE_SLAB).shapes]
    ids = jax.ShapeDtypeStruct((3,), jnp.int32)
    staging = jax.ShapeDtypeStruct((3, row_elements(layers)), jnp.float32)
    assert mosaic_gpu.unsupported(layers, ids) is None
    with pytest.raises(ValueError, match=r"write in place from 0\.11 on"):
        jax.eval_shape(mosaic_gpu.scatter_pages, layers, ids, staging)
