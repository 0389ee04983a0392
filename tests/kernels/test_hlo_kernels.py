"""Kernels and bytes read from the text of a compiled program."""

from __future__ import annotations

from hlo_kernels import kernels_of

HLO = """\
HloModule jit_step, entry_computation_layout={(bf16[100,8]{1,0})->bf16[4,8]{1,0}}

%fused_gather (param_0: bf16[100,8], param_1: s32[4]) -> bf16[4,8] {
  %param_0 = bf16[100,8]{1,0} parameter(0)
  %param_1 = s32[4]{0} parameter(1)
  ROOT %gather.1 = bf16[4,8]{1,0} gather(%param_0, %param_1), offset_dims={1}
}

%fused_write (param_0.1: bf16[64,8], param_1.1: bf16[1,8], param_2: s32[]) -> bf16[64,8] {
  %param_0.1 = bf16[64,8]{1,0} parameter(0)
  %param_1.1 = bf16[1,8]{1,0} parameter(1)
  %param_2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %dus = bf16[64,8]{1,0} dynamic-update-slice(%param_0.1, %param_1.1, %param_2, %zero)
}

%fused_turn (param_0.2: bf16[64,8]) -> bf16[8,64] {
  %param_0.2 = bf16[64,8]{1,0} parameter(0)
  ROOT %transpose.1 = bf16[8,64]{1,0} transpose(%param_0.2), dimensions={1,0}
}

%body (carry: bf16[4,8]) -> bf16[4,8] {
  %carry = bf16[4,8]{1,0} parameter(0)
  ROOT %negate.1 = bf16[4,8]{1,0} negate(%carry)
}

%condition (carry.1: bf16[4,8]) -> pred[] {
  %carry.1 = bf16[4,8]{1,0} parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main.9 (table: bf16[100,8], ids: s32[4], pages: bf16[64,8]) -> bf16[4,8] {
  %table = bf16[100,8]{1,0} parameter(0), metadata={op_name="table"}
  %ids = s32[4]{0} parameter(1)
  %pages = bf16[64,8]{1,0} parameter(2)
  %at = s32[] constant(3)
  %x = bf16[4,8]{1,0} fusion(%table, %ids), calls=%fused_gather, metadata={op_name="jit(f)/embed"}
  %row = bf16[1,8]{1,0} bitcast(%x)
  %written = bf16[64,8]{1,0} fusion(%pages, %row, %at), kind=kLoop, calls=%fused_write
  %copy.1 = bf16[64,8]{0,1} copy(%written)
  %turned = bf16[8,64]{1,0} fusion(%copy.1), kind=kInput, calls=%fused_turn
  %product = (bf16[4,8]{1,0}, s8[4096]{0}) custom-call(%x, %turned), custom_call_target="__cublas"
  %y = bf16[4,8]{1,0} get-tuple-element(%product), index=0
  %attended = bf16[4,8]{1,0} custom-call(%y, %written), custom_call_target="mosaic_gpu_v2"
  ROOT %looped = bf16[4,8]{1,0} while(%attended), condition=%condition, body=%body
}
"""


def test_kernels_are_what_the_host_launches():
    found = kernels_of(HLO, pool_bytes=64 * 8 * 2)
    kinds = ["fusion", "fusion", "copy", "fusion", "__cublas", "mosaic_gpu_v2", "while"]
    assert [kernel.kind for kernel in found] == [*kinds, "negate"]
    assert [kernel.loops for kernel in found].index(True) == 6
    assert found[0].source == "embed"


def test_trips_of_a_known_number_are_launches_and_no_loop():
    known = ', body=%body, metadata={op_name="go"}, backend_config={"known_trip_count":{"n":"3"}}'
    found = kernels_of(HLO.replace(", body=%body", known), pool_bytes=64 * 8 * 2)
    assert [kernel.kind for kernel in found[-3:]] == ["negate"] * 3
    assert not any(kernel.loops for kernel in found)


def test_bytes_are_those_of_the_parts_that_are_touched():
    gathered, written, copied, turned, product, attended, loop, negated = (
        kernel.moved_bytes for kernel in kernels_of(HLO, pool_bytes=64 * 8 * 2)
    )
    x, pool = 4 * 8 * 2, 64 * 8 * 2
    assert gathered == x + 4 * 4 + x
    assert written == 8 * 2 + 4 + 8 * 2
    assert copied == turned == 2 * pool
    assert product == 2 * x, "its workspace is none of it, nor is what is as large as the pool"
    assert attended == 2 * x, "pages are counted by their tokens"
    assert (loop, negated) == (0, 2 * x)


def test_copies_of_the_pool_and_transposes_are_found():
    found = kernels_of(HLO, pool_bytes=64 * 8 * 2)
    assert [kernel.name for kernel in found if kernel.copies_pool] == ["copy.1", "turned"]
    assert [kernel.name for kernel in found if kernel.transposes] == ["turned"]
