"""What is measured on an H200."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from device.attention import Attention
from device.decode_layers import DecodeLayers
from device.limits import Limit
from device.packed_weights import PackedMatmul
from device.page_moves import PageMove, possible
from device.page_writes import PageWrite
from device.residual_norms import ResidualNorm
from pallas_kernels.quantized_matmul import FP8, GGUF, Format


class Case(NamedTuple):
    """A problem with a name, and what is to be reached.

    limit: what its share is of, "read" or "copy" (bytes a second) or "matmul" (operations).
    target: the share to reach at least.
    parts: names of cases whose times together are what this one's is compared with instead.
    """

    name: str
    spec: Attention | DecodeLayers | Limit | PackedMatmul | PageMove | PageWrite | ResidualNorm
    limit: str = "copy"
    target: float | None = None
    parts: tuple[str, ...] = ()


K = 1024

LIMITS = [
    Case("read", Limit("read"), "read"),
    Case("copy", Limit("copy")),
    Case("negate", Limit("negate")),
    Case("matmul", Limit("matmul"), "matmul"),
]

SMOKE = [
    Case("smoke: decode", Attention((1000,) * 4)),
    Case("smoke: decode, 2 to 32 splits", Attention((600, 2000, 4000, 9000, 16_000))),
    Case("smoke: decode on 4 multiprocessors", Attention((600, 2000, 4000, 9000), sms=4)),
    Case("smoke: decode, window, head_dim 64", Attention((3000,) * 4, head_dim=64, window=1000)),
    Case("smoke: decode, int8 pages", Attention((1000,) * 4, kv_dtype="int8")),
    Case("smoke: decode, scales", Attention((1000,) * 4, kv_dtype="int8", scaled=True)),
    Case("smoke: prefill", Attention(chunks=((1000, 300),))),
    Case("smoke: prefill, scales", Attention(chunks=((1000, 300),), kv_dtype="int8", scaled=True)),
    Case("smoke: prefill on 4 multiprocessors", Attention(chunks=((1000, 300),), sms=4)),
    *(
        Case(
            f"smoke: prefill, window, head_dim {head_dim}",
            Attention(chunks=((1000, 300), (240, 16)), head_dim=head_dim, window=104),
        )
        for head_dim in (64, 128, 256)
    ),
    Case("smoke: decodes and chunks", Attention((1000, 3000), ((1000, 300), (40, 40)))),
    Case("smoke: gather 4 pages", PageMove("gather", 4, 9)),
    Case("smoke: scatter 4 pages", PageMove("scatter", 4, 9)),
    Case("smoke: copy 4 pages", PageMove("copy", 4, 9)),
    Case("smoke: Q4_0, 16 tokens", PackedMatmul(GGUF["Q4_0"], 16, 512, 1024)),
    Case("smoke: 4 parts, residual and norm", ResidualNorm(9, 4, 1024)),
]
"""Every kernel, small, with what is most likely to break: the first that a new device does."""

TARGETS = [
    Case("decode 64 x 8k", Attention((8 * K,) * 64), "read", target=0.92),
    Case("decode 1 x 8k", Attention((8 * K,)), "read", target=0.80),
    Case("decode 1 x 128k", Attention((128 * K,)), "read", target=0.85),
    Case("prefill 16k", Attention(chunks=((16 * K, 16 * K),)), "matmul", target=0.60),
    Case(
        "63 decodes of 4k + a chunk of 1k",
        Attention((4 * K,) * 63, ((4 * K, K),)),
        target=1.1,
        parts=("decode 63 x 4k", "a chunk of 1k at 4k"),
    ),
    Case("gather 64 pages", PageMove("gather", 64), target=0.85),
    Case("scatter 64 pages", PageMove("scatter", 64), target=0.85),
    *(
        Case(f"Q4_0, {tokens} tokens", PackedMatmul(GGUF["Q4_0"], tokens), target=0.70)
        for tokens in (1, 16)
    ),
]

PARTS_OF_TARGETS = [
    Case("decode 63 x 4k", Attention((4 * K,) * 63)),
    Case("a chunk of 1k at 4k", Attention(chunks=((4 * K, K),)), "matmul"),
]

RAGGED = (100, 900, 2 * K, 2 * K, 5 * K, 9 * K, 20 * K, 33 * K) * 4

MORE = [
    *(Case(f"decode 1 x {k}k", Attention((k * K,)), "read") for k in (1, 33, 68)),
    Case("decode 8 x 33k", Attention((33 * K,) * 8), "read"),
    Case("a tree of 8 on 32k", Attention(chunks=((32 * K, 8),), tree=8), "read"),
    Case("decode 32 ragged", Attention(RAGGED)),
    Case("decode 64 x 8k, window 1k", Attention((8 * K,) * 64, window=K)),
    Case("decode 64 x 8k, pages of 16", Attention((8 * K,) * 64, page_size=16)),
    Case("decode 64 x 8k, heads 64/8", Attention((8 * K,) * 64, heads=64)),
    Case("decode 64 x 8k, heads 8/8", Attention((8 * K,) * 64, heads=8)),
    Case("decode 64 x 8k, head_dim 64", Attention((8 * K,) * 64, head_dim=64)),
    Case(
        "decode 64 x 8k, head_dim 256, capped",
        Attention((8 * K,) * 64, heads=16, head_dim=256, soft_cap=50.0),
    ),
    Case("decode 64 x 8k, int8 pages", Attention((8 * K,) * 64, kv_dtype="int8")),
    Case("decode 64 x 8k, fp8 pages", Attention((8 * K,) * 64, kv_dtype="float8_e4m3fn")),
    Case(
        "decode 64 x 8k, int8 pages, scale 0.017",
        Attention((8 * K,) * 64, kv_dtype="int8", kv_scale=0.017),
    ),
    Case(
        "decode 64 x 8k, int8 pages, scales of tokens",
        Attention((8 * K,) * 64, kv_dtype="int8", scaled=True),
    ),
    Case("decode 64 x 8k, sinks", Attention((8 * K,) * 64, sinks=True)),
    Case("trees of 8 on 32 x 4k", Attention(chunks=((4 * K, 8),) * 32, tree=8)),
    Case("prefill 8 x 2k", Attention(chunks=((2 * K, 2 * K),) * 8), "matmul"),
    Case("prefill 16k, window 4k", Attention(chunks=((16 * K, 16 * K),), window=4 * K), "matmul"),
    Case("prefill 16k, head_dim 64", Attention(chunks=((16 * K,) * 2,), head_dim=64), "matmul"),
    Case("a chunk of 2k at 64k", Attention(chunks=((64 * K, 2 * K),)), "matmul"),
    Case(
        "a chunk of 2k at 64k, int8 pages",
        Attention(chunks=((64 * K, 2 * K),), kv_dtype="int8"),
        "matmul",
    ),
    Case(
        "a chunk of 2k at 64k, fp8 pages, scale 0.017",
        Attention(chunks=((64 * K, 2 * K),), kv_dtype="float8_e4m3fn", kv_scale=0.017),
        "matmul",
    ),
    Case(
        "a chunk of 2k at 64k, int8 pages, scales of tokens",
        Attention(chunks=((64 * K, 2 * K),), kv_dtype="int8", scaled=True),
        "matmul",
    ),
    Case("write 64 tokens", PageWrite(64)),
    Case("write 2k tokens", PageWrite(2 * K)),
    Case("write 64 tokens, int8 pages", PageWrite(64, kv_dtype="int8")),
    *(Case(f"8 parts, residual, norm, {n} tokens", ResidualNorm(n)) for n in (1, 64)),
    Case("copy 16 pages", PageMove("copy", 16)),
    Case("gather 16 pages", PageMove("gather", 16)),
    Case("scatter 16 pages", PageMove("scatter", 16)),
    *(
        Case(f"{name}, {tokens} tokens", PackedMatmul(form, tokens), limit)
        for name, form in {
            "Q4_1": GGUF["Q4_1"],
            "int4 in groups of 128": Format("int4", 128, scale_dtype="bfloat16"),
            "Q8_0": GGUF["Q8_0"],
            "int8 in rows": Format("int8", None),
        }.items()
        for tokens, limit in ((16, "copy"), (4096, "matmul"))
    ),
    Case("Q4_0, 4096 tokens", PackedMatmul(GGUF["Q4_0"], 4096), "matmul"),
    Case("fp8 x fp8, 16 tokens", PackedMatmul(FP8, 16, dtype="float8_e4m3fn")),
    Case("fp8 x fp8, 4096 tokens", PackedMatmul(FP8, 4096, dtype="float8_e4m3fn"), "matmul"),
]

LAYERS = [Case(f"decode layers, {how}", DecodeLayers(how)) for how in ("unrolled", "scanned")]

ALL = [*LIMITS, *SMOKE, *TARGETS, *PARTS_OF_TARGETS, *MORE, *LAYERS]


def wanted(some: Iterable[Case], only: tuple[str, ...]) -> list[Case]:
    """Of these cases, those of operations asked for (all unless any) that this JAX can do.

    Limits are always wanted.
    """
    return [
        case
        for case in some
        if (not only or case.spec.op in only or isinstance(case.spec, Limit))
        and possible(case.spec)
    ]
