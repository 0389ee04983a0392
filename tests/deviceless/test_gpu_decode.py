"""The Hopper decode kernel compiled for an H200 without one: what compiler and assembler say."""

from __future__ import annotations

import functools
import re

import jax.numpy as jnp
import pytest
from gpu import array

from pallas_kernels.paged_attention import KVPages, RaggedBatch
from pallas_kernels.paged_attention.mosaic_gpu_decode import paged_decode

pytestmark = pytest.mark.deviceless


def decode_arguments(rows, heads, kv_heads, head_dim, page_size, context=8192, dtype=jnp.bfloat16):
    ints = functools.partial(array, dtype=jnp.int32)
    pages = KVPages(
        array(512, kv_heads, head_dim, page_size, dtype=dtype),
        array(512, kv_heads, page_size, head_dim, dtype=dtype),
    )
    batch = RaggedBatch(ints(rows, context // page_size), ints(rows), ints(rows), ints(rows))
    return array(rows, heads, head_dim, dtype=dtype), pages, batch


def decode_shapes(heads, kv_heads, head_dim, page_size, dtype=jnp.bfloat16):
    return locals()


DECODES = [
    *((decode_shapes(32, 8, 128, page_size), {}) for page_size in (16, 32, 64, 128)),
    (decode_shapes(8, 8, 64, 16, jnp.float16), {"window": 1000}),
    (decode_shapes(16, 1, 64, 64), {"soft_cap": 30.0}),
    (decode_shapes(64, 1, 128, 64), {"window": 128, "soft_cap": 30.0}),
    (decode_shapes(32, 8, 256, 16), {"window": 1000, "soft_cap": 30.0}),
    (decode_shapes(16, 8, 256, 64), {}),
]


@pytest.mark.parametrize(("shapes", "options"), DECODES)
def test_paged_decode(compiled, shapes, options):
    """Nothing spills, one block of threads fits, and the work is done by the units meant for it."""
    function = functools.partial(paged_decode, num_decodes=8, scale=0.1, **options)
    kernel = compiled(function, decode_arguments(8, **shapes))
    assert set(kernel.numbers(r"(\d+) bytes spill")) == {0}
    registers = max(kernel.numbers(r"Used (\d+) registers"))
    warpgroups = 2 if shapes["head_dim"] == 256 else 4
    assert registers * 128 * warpgroups <= 65_536
    assert "C75" not in kernel.report, "the assembler serialised wgmma or ignored setmaxnreg"
    ptx = kernel.dumped(".ptx").read_text()
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
    code = kernel.machine_code()
    assert "HGMMA" in code and "UTMALDG" in code
    assert not re.search(r"\b(LDL|STL)\b", code)


def test_paged_decode_copies_no_pages_and_plans_once_for_all_layers(compiled):
    """Temporary memory is partial results; a second layer adds a kernel, a pad and a merge."""

    def layers(q, first, second, batch):
        decode = functools.partial(paged_decode, num_decodes=64, scale=0.1)
        out, _ = decode(q, first, batch)
        return decode(out, second, batch)

    q, pages, batch = decode_arguments(64, 32, 8, 128, 64)
    executable = compiled(layers, (q, pages, pages, batch)).executable
    splits = 8192 // 512
    partials = 64 * splits * 32 * (128 + 8) * 4
    assert executable.memory_analysis().temp_size_in_bytes < 2 * partials + 2**22
    kernels = re.findall(r"= .*\b(?:fusion|custom-call)\(", executable.as_text().split("ENTRY")[1])
    assert sum("custom-call(" in kernel for kernel in kernels) == 2
    assert sum("s32[1024,6]" in kernel for kernel in kernels) == 1
