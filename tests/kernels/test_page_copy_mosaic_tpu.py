"""The TPU kernels that move pages, against numpy.

Mostly compiled to XLA, which is fast; and in small by the simulator that detects races and begins
copies as late as it may.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_page_copy import (
    DTYPES,
    PAGES,
    SCALED,
    PageCopyContract,
    assert_same_bits,
    assert_same_pages,
    layout,
    pool,
    random_bits,
    without_payloads,
)

from pallas_kernels.compat import tpu as compat
from pallas_kernels.page_copy import mosaic_tpu, reference, row_elements

pytestmark = pytest.mark.interpreted

gather = functools.partial(mosaic_tpu.gather_pages, interpret=True)
scatter = functools.partial(mosaic_tpu.scatter_pages, interpret=True)


def copy(layers, sources, targets):
    inside = (sources >= 0) & (sources < PAGES)
    return scatter(layers, jnp.where(inside, targets, -1), gather(layers, sources))


class TestMosaicTpu(PageCopyContract):
    dtypes = (*DTYPES, *SCALED)
    gather, scatter, copy = map(staticmethod, (gather, scatter, copy))


IDS = np.int32([5, -1, 2, PAGES, 6, 0])


@pytest.mark.oldest_jax
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_copy_races_with_another(dtype):
    layers = pool(dtype)
    staging = random_bits(
        (len(IDS), row_elements(layers)), layers[0].k.dtype, np.random.default_rng(1)
    )
    layers, staging = without_payloads((layers, staging))
    with compat.tpu_interpreter() as interpreter:
        arguments = jax.tree.map(jnp.asarray, (layers, IDS))
        gathered = mosaic_tpu.gather_pages(*arguments, interpret=interpreter)
        assert_same_bits(gathered, reference.gather_pages(layers, IDS))
        written = mosaic_tpu.scatter_pages(*arguments, jnp.asarray(staging), interpret=interpreter)
        assert_same_pages(written, reference.scatter_pages(layers, IDS, staging))


def test_pages_that_are_not_whole_tiles_are_refused():
    ids = jax.ShapeDtypeStruct((3,), jnp.int32)
    for kind in ({"head_dim": 128, "page_size": 64}, {"head_dim": 80, "page_size": 128}):
        layers = [layout("float32", **kind).shapes]
        message = (
            "pages have {page_size} tokens and head_dim {head_dim}; they must be multiples of 128 "
            "and 32"
        )
        with pytest.raises(ValueError, match=message.format(**kind)):
            jax.eval_shape(mosaic_tpu.gather_pages, layers, ids)
    for head_dim in (64, 256):
        layers = [layout("float32", head_dim=head_dim, page_size=128).shapes]
        assert mosaic_tpu.unsupported(layers, ids) is None
