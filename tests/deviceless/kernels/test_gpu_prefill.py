"""The Hopper prefill kernel compiled for an H200 without one: what compiler and assembler say."""

from __future__ import annotations

import functools
import re

import jax.numpy as jnp
import pytest
from exhaustive import combination
from gpu import array, products_with_registers

from pallas_kernels.paged_attention import KVPages, RaggedBatch, Visible
from pallas_kernels.paged_attention.gpu.prefill import paged_prefill

pytestmark = pytest.mark.deviceless


def prefill_arguments(
    tokens, heads, kv_heads, head_dim, page_size, dtype=jnp.bfloat16, stored=None, scaled=False
):
    ints = functools.partial(array, dtype=jnp.int32)
    pages = KVPages(
        array(512, kv_heads, head_dim, page_size, dtype=stored or dtype),
        array(512, kv_heads, page_size, head_dim, dtype=stored or dtype),
        array(512, kv_heads, 2, page_size, dtype=jnp.float32) if scaled else None,
    )
    batch = RaggedBatch(ints(4, 16384 // page_size), ints(4), ints(4), ints(4))
    return array(tokens, heads, head_dim, dtype=dtype), pages, batch, Visible(*[ints(tokens)] * 2)


def prefill_shapes(
    heads, kv_heads, head_dim, page_size, dtype=jnp.bfloat16, stored=None, scaled=False
):
    return locals()


PREFILLS = [
    (prefill_shapes(32, 8, 128, 64), {}),
    (prefill_shapes(28, 4, 128, 128), {"soft_cap": 30.0}),
    (prefill_shapes(64, 8, 64, 32, jnp.float16), {}),
    (prefill_shapes(16, 16, 256, 128), {}),
    (prefill_shapes(32, 8, 128, 64, stored=jnp.int8), {}),
    (prefill_shapes(28, 4, 128, 16, stored=jnp.float8_e4m3fn, scaled=True), {"soft_cap": 30.0}),
    (prefill_shapes(9, 3, 64, 16, stored=jnp.float8_e4m3fn, scaled=True), {"soft_cap": 30.0}),
    combination(prefill_shapes(32, 8, 128, 16), {}),
    combination(prefill_shapes(14, 2, 256, 32), {"soft_cap": 30.0}),
    combination(prefill_shapes(32, 8, 128, 16, stored=jnp.float8_e4m3fn), {"soft_cap": 30.0}),
    combination(prefill_shapes(28, 4, 128, 128, jnp.float16, stored=jnp.float8_e4m3fn), {}),
    combination(prefill_shapes(64, 8, 64, 32, jnp.float16, stored=jnp.int8), {}),
    combination(prefill_shapes(32, 8, 128, 64, stored=jnp.int8, scaled=True), {}),
    combination(prefill_shapes(28, 4, 128, 128, jnp.float16, stored=jnp.int8, scaled=True), {}),
]


@pytest.mark.parametrize(("shapes", "options"), PREFILLS)
def test_paged_prefill(compiled, shapes, options):
    """Nothing spills, one block of threads fits, and the work is done by the units meant for it."""
    function = functools.partial(paged_prefill, scale=0.1, **options)
    kernel = compiled(function, prefill_arguments(2048, **shapes))
    assert set(kernel.numbers(r"(\d+) bytes spill")) == {0}
    assert max(kernel.numbers(r"Used (\d+) registers")) * 128 * 3 <= 65_536
    assert "C75" not in kernel.report, "the assembler serialised wgmma or ignored setmaxnreg"
    ptx = kernel.dumped(".ptx").read_text()
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
    code = kernel.machine_code()
    assert "HGMMA" in code and "UTMALDG" in code and "UTMASTG" in code
    assert not re.search(r"\b(LDL|STL)\b", code)
    assert products_with_registers(code)


def test_paged_prefill_copies_no_pages_and_plans_once_for_all_layers(compiled):
    """Temporary memory is results by block; a layer adds the kernel and the choice from them."""

    def layers(q, first, second, batch, visible):
        prefill = functools.partial(paged_prefill, scale=0.1)
        out, _ = prefill(q, first, batch, visible)
        return prefill(out, second, batch, visible)

    q, pages, batch, visible = prefill_arguments(2048, 32, 8, 128, 64)
    executable = compiled(layers, (q, pages, pages, batch, visible)).executable
    results = 2 * (2048 + 4 * 32) * 32 * (128 * 2 + 4)
    assert executable.memory_analysis().temp_size_in_bytes < results + 2**22
    text = executable.as_text().split("ENTRY")[1]
    kernels = re.findall(r"= .*\b(?:fusion|custom-call|copy)\(", text)
    assert sum("custom-call(" in kernel for kernel in kernels) == 2
    assert len([kernel for kernel in kernels if "bf16[" in kernel]) == 4
    assert len(kernels) <= 20, kernels
