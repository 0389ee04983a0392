"""The TPU kernels that move pages, compiled for TPUs without one."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from tpu import array, compiled, sharding

from pallas_kernels.page_copy import mosaic_tpu, row_elements
from pallas_kernels.paged_attention import KVPages

pytestmark = pytest.mark.deviceless

NUM_PAGES, NUM_ROWS = 512, 16

KINDS = [
    ("v5e:2x2", "int8", 8, 128, 128),
    ("v5e:2x2", "float32", 8, 64, 128),
    ("v5p:2x2x1", "float8_e4m3fn", 2, 256, 128),
    ("v6e:2x2", "bfloat16", 8, 128, 128),
    ("v6e:2x2", "bfloat16", 3, 64, 128),
    ("tpu7x:2x2x1", "bfloat16", 4, 128, 256),
]
"""Chip, dtype, KV heads, head_dim and page size."""


def move(kind):
    """Layers, page ids and staging."""
    chip, dtype, heads, head_dim, page_size = kind
    on = sharding(chip)
    k = array(on, NUM_PAGES, heads, head_dim, page_size, dtype=dtype)
    v = array(on, NUM_PAGES, heads, page_size, head_dim, dtype=dtype)
    layers = [KVPages(k, v)] * 2
    staging = array(on, NUM_ROWS, row_elements(layers), dtype=dtype)
    return layers, array(on, NUM_ROWS, dtype=jnp.int32), staging


@pytest.mark.parametrize("kind", KINDS)
def test_pages_are_scattered_where_the_pool_lies(kind):
    layers, ids, staging = move(kind)
    executable = compiled(mosaic_tpu.scatter_pages, layers, ids, staging, donate=(0,))
    memory = executable.memory_analysis()
    page_bytes = row_elements(layers) * staging.dtype.itemsize
    assert memory.alias_size_in_bytes == NUM_PAGES * page_bytes
    assert memory.temp_size_in_bytes <= 2 * NUM_ROWS * page_bytes
    assert executable.as_text().count('custom_call_target="tpu_custom_call"') == 1


@pytest.mark.parametrize("kind", KINDS)
def test_gathering_only_reads_the_pool(kind):
    layers, ids, staging = move(kind)
    executable = compiled(mosaic_tpu.gather_pages, layers, ids)
    temporary = executable.memory_analysis().temp_size_in_bytes
    assert temporary <= 2 * NUM_ROWS * row_elements(layers) * staging.dtype.itemsize
    assert executable.as_text().count('custom_call_target="tpu_custom_call"') == 1
