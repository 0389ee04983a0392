"""The Hopper kernels that move pages, compiled for an H200 without one."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from gpu import array, h200

from pallas_kernels.compat import GPU_KERNELS_WRITE_IN_PLACE
from pallas_kernels.page_copy import mosaic_gpu, row_elements
from pallas_kernels.paged_attention import KVPages

pytestmark = pytest.mark.deviceless

NUM_LAYERS, NUM_ROWS = 32, 16


def pool(dtype, heads=8, head_dim=128, page_size=64, num_pages=256):
    k = array(num_pages, heads, head_dim, page_size, dtype=dtype)
    v = array(num_pages, heads, page_size, head_dim, dtype=dtype)
    return [KVPages(k, v)] * NUM_LAYERS


def move(name, layers):
    """The kernel's function, and its arguments."""
    arguments = [layers, array(NUM_ROWS, dtype=jnp.int32)]
    if name == "scatter":
        if not GPU_KERNELS_WRITE_IN_PLACE:
            pytest.skip("needs JAX 0.11 or newer")
        arguments += [array(NUM_ROWS, row_elements(layers), dtype=layers[0].k.dtype)]
    return getattr(mosaic_gpu, f"{name}_pages"), arguments


def operations(executable):
    """Of a program, what is more than another name for the same memory."""
    entry = executable.as_text().split("ENTRY")[1]
    found = re.findall(r"^  (?:ROOT )?%\S+ = .*? ([a-z][\w-]*)\(", entry, re.MULTILINE)
    names = {"parameter", "bitcast", "tuple", "get-tuple-element"}
    assert found
    return [operation for operation in found if operation not in names]


@pytest.mark.parametrize("name", ["gather", "scatter"])
@pytest.mark.parametrize(
    "layers",
    [
        pool("bfloat16"),
        pool("float8_e4m3fn"),
        pool("float32", heads=5, head_dim=80, page_size=16),
        pool("int8", heads=1, head_dim=64, page_size=16),
        pool("float16", heads=3, head_dim=256, page_size=128),
    ],
)
def test_all_layers_are_moved_by_one_kernel_that_only_issues_copies(compiled, name, layers):
    function, arguments = move(name, layers)
    kernel = compiled(function, arguments)
    assert set(kernel.numbers(r"(\d+) bytes spill")) == {0}
    assert max(kernel.numbers(r"Used (\d+) registers")) <= 32
    ptx = kernel.dumped(".ptx").read_text()
    assert ptx.count("cp.async.bulk.shared::cta.global") == 1
    assert ptx.count("cp.async.bulk.global.shared::cta") == 1
    code = kernel.machine_code()
    assert "UBLKCP" in code
    assert not re.search(r"\b(LDL|STL)\b", code)


@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_the_pool_is_not_copied(name):
    """Donated, it is written where it lies; not donated, it is only read."""
    layers = pool("bfloat16")
    function, arguments = move(name, layers)
    donated = (0,) if name == "scatter" else ()
    with jax.sharding.use_abstract_mesh(h200().mesh.abstract_mesh):
        lowered = jax.jit(function, donate_argnums=donated).lower(*arguments)
    executable = lowered.compile()
    assert operations(executable) == ["custom-call"]
    memory = executable.memory_analysis()
    pool_bytes = 256 * row_elements(layers) * layers[0].k.dtype.itemsize
    assert memory.alias_size_in_bytes == (pool_bytes if donated else 0)
    assert memory.temp_size_in_bytes < 2**16
