"""The Hopper decode kernel compiled for an H200 without one: what compiler and assembler say."""

from __future__ import annotations

import functools
import re

import jax.numpy as jnp
import pytest
from exhaustive import combination
from gpu import array, check_box, products_with_registers

from pallas_kernels.paged_attention import KVPages, RaggedBatch, Visible
from pallas_kernels.paged_attention.gpu.decode import paged_decode
from pallas_kernels.paged_attention.gpu.decode_work import Cutting
from pallas_kernels.paged_attention.gpu.merge import AT_ONCE, merge_splits

pytestmark = pytest.mark.deviceless


def decode_arguments(
    rows,
    heads,
    kv_heads,
    head_dim,
    page_size,
    context=8192,
    dtype=jnp.bfloat16,
    stored=None,
    scaled=False,
):
    ints = functools.partial(array, dtype=jnp.int32)
    pages = KVPages(
        array(512, kv_heads, head_dim, page_size, dtype=stored or dtype),
        array(512, kv_heads, page_size, head_dim, dtype=stored or dtype),
        array(512, kv_heads, 2, page_size, dtype=jnp.float32) if scaled else None,
    )
    batch = RaggedBatch(ints(rows, context // page_size), ints(rows), ints(rows), ints(rows))
    return array(rows, heads, head_dim, dtype=dtype), pages, batch, Visible(ints(rows), ints(rows))


def decode_shapes(
    heads, kv_heads, head_dim, page_size, dtype=jnp.bfloat16, stored=None, scaled=False
):
    return locals()


DECODES = [
    (decode_shapes(32, 8, 128, 16), None),
    (decode_shapes(32, 8, 128, 64), None),
    (decode_shapes(32, 8, 128, 128), None),
    (decode_shapes(8, 8, 64, 16, jnp.float16), None),
    (decode_shapes(64, 1, 128, 64), 30.0),
    (decode_shapes(32, 8, 256, 16), 30.0),
    (decode_shapes(32, 8, 128, 64, stored=jnp.int8), None),
    (decode_shapes(32, 8, 128, 16, stored=jnp.float8_e4m3fn, scaled=True), 30.0),
    (decode_shapes(9, 3, 64, 128, stored=jnp.int8, scaled=True), None),
    (decode_shapes(16, 8, 256, 32, stored=jnp.int8, scaled=True), None),
    combination(decode_shapes(32, 8, 128, 32), None),
    combination(decode_shapes(16, 1, 64, 64), 30.0),
    combination(decode_shapes(16, 8, 256, 64), None),
    combination(decode_shapes(32, 8, 128, 16, stored=jnp.float8_e4m3fn), 30.0),
    combination(decode_shapes(16, 8, 64, 32, jnp.float16, stored=jnp.int8), 30.0),
    combination(decode_shapes(16, 8, 256, 64, jnp.float16, stored=jnp.int8), None),
    combination(decode_shapes(32, 8, 256, 16, stored=jnp.float8_e4m3fn), 30.0),
    combination(decode_shapes(32, 8, 128, 64, stored=jnp.int8, scaled=True), None),
]


@pytest.mark.parametrize(("shapes", "soft_cap"), DECODES)
def test_paged_decode(compiled, shapes, soft_cap):
    """Nothing spills, one block of threads fits, and the work is done by the units meant for it."""
    function = functools.partial(paged_decode, num_decodes=8, scale=0.1, soft_cap=soft_cap)
    kernel = compiled(function, decode_arguments(8, **shapes)).of("paged_decode")
    assert set(kernel.numbers(r"(\d+) bytes spill")) == {0}
    registers = max(kernel.numbers(r"Used (\d+) registers"))
    warpgroups = 2 if shapes["head_dim"] == 256 else 4
    assert registers * 128 * warpgroups <= 65_536
    assert kernel.boxes
    assert "C75" not in kernel.report, "the assembler serialised wgmma or ignored setmaxnreg"
    ptx = kernel.dumped(".ptx").read_text()
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx
    code = kernel.machine_code()
    assert "HGMMA" in code and "UTMALDG" in code
    assert not re.search(r"\b(LDL|STL)\b", code)
    assert products_with_registers(code)


@pytest.mark.parametrize(("head_dim", "budget"), [(64, 64), (128, 128), (256, 192)])
def test_merge_splits(compiled, head_dim, budget):
    """Parts come in wide loads, as many at once as there are registers for."""
    cutting = Cutting.of(8192, 512, 32)
    shape = cutting.splits, 8, 8, 8
    kernel = compiled(
        functools.partial(merge_splits, cutting=cutting, group=3, dtype=jnp.bfloat16),
        (
            array(*shape, head_dim, dtype=jnp.float32),
            array(*shape, dtype=jnp.float32),
            array(8, dtype=jnp.int32),
            array(8, dtype=jnp.int32),
        ),
    )
    assert set(kernel.numbers(r"(\d+) bytes spill")) == {0}
    assert max(kernel.numbers(r"Used (\d+) registers")) <= budget
    code = kernel.machine_code()
    assert len(re.findall(r"\bLDG?\.E\.128", code)) >= AT_ONCE * head_dim // 64


def test_paged_decode_copies_no_pages_and_plans_once_for_all_layers(compiled):
    """Temporary memory is partial results. Two layers are two kernels and a pad each, one plan, and
    the result's own form for log-sum-exps."""

    def layers(q, first, second, batch, visible):
        decode = functools.partial(paged_decode, num_decodes=64, scale=0.1)
        out, _ = decode(q, first, batch, visible)
        return decode(out, second, batch, visible)

    q, pages, batch, visible = decode_arguments(64, 32, 8, 128, 64)
    executable = compiled(layers, (q, pages, pages, batch, visible)).executable
    splits = 8192 // 512
    partials = 64 * splits * 64 * (128 + 1) * 4  # 32 heads, those of a KV head padded to 8
    assert executable.memory_analysis().temp_size_in_bytes < 2 * partials + 2**22
    kernels = re.findall(r"= .*\b(?:fusion|custom-call)\(", executable.as_text().split("ENTRY")[1])
    assert sum("custom-call(" in kernel for kernel in kernels) == 4
    assert len(kernels) == 4 + 2 + 1 + 1


@pytest.mark.parametrize(
    ("box", "bits", "swizzle"),
    [((1,) * 6, 16, None), ((512, 64), 16, 128), ((8, 4), 16, None), ((8, 128), 16, 128)],
)
def test_boxes_that_drivers_refuse_are_found(box, bits, swizzle):
    check_box((8, 64), 16, 128)
    with pytest.raises(AssertionError):
        check_box(box, bits, swizzle)
