"""The classes of shapes that `verified.json` is to know, the most common first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from device.attention import Attention
from device.packed_weights import PackedMatmul
from device.page_moves import PageMove, possible
from device.problem import Problem, Shapes
from device.residual_norms import ResidualNorm
from pallas_kernels import self_check
from pallas_kernels.quantized_matmul import FP8, GGUF, Format

HEADS = (
    (32, 8, 128),  # Llama 3 8B, Mistral 7B, Qwen3 8B
    (9, 3, 64),  # SmolLM2 135M
    (64, 8, 128),  # Llama 3 70B, Qwen3 32B
    (32, 8, 64),  # Llama 3.2 1B
    (16, 8, 128),  # Qwen3 0.6B
    (32, 32, 128),  # OLMo 2 7B
    (24, 8, 128),  # Llama 3.2 3B
    (40, 8, 128),  # Qwen3 14B
    (32, 4, 128),  # Qwen3 30B-A3B
    (64, 8, 64),  # gpt-oss 20B
    (15, 5, 64),  # SmolLM2 360M
    (40, 40, 128),  # OLMo 2 13B
)
"""Query heads, KV heads and head_dim."""

CAPPED = ((16, 8, 256), (8, 4, 256))  # Gemma 2 9B and 2B, whose scores are capped
RESIDUALS = ((8, 4096), (16, 2048), (4, 2048), (8, 3072), (4, 3072), (4, 5120), (4, 8192))
"""Parts of products of few tokens on 132 multiprocessors, and the hidden size."""

FORMATS = (
    *GGUF.values(),
    *(Format("int4", group, scale_dtype="bfloat16") for group in (32, 128)),
    Format("int8", None),
    FP8,
)


def specs(only: tuple[str, ...]) -> Iterator[Attention | PageMove | PackedMatmul | ResidualNorm]:
    """A small case of each class of operations asked for, all unless any, that this JAX can do."""
    for spec in _all():
        if (not only or spec.op in only) and possible(spec):
            yield spec


def _all() -> Iterator[Attention | PageMove | PackedMatmul | ResidualNorm]:
    for heads in HEADS:
        yield from _attentions(heads)
    for heads in CAPPED:
        yield from _attentions(heads, soft_cap=50.0)
    for parts, hidden in RESIDUALS:
        yield ResidualNorm(2, parts, hidden)
    for form in FORMATS:
        for tokens in (1, 512):
            yield PackedMatmul(form, tokens, 512, 1024)
    for tokens in (1, 512):
        yield PackedMatmul(FP8, tokens, 512, 1024, dtype="float8_e4m3fn")
    for kv_heads, head_dim in dict.fromkeys(shape[1:] for shape in HEADS + CAPPED):
        for direction in ("gather", "scatter"):
            yield PageMove(direction, 4, 9, 2, kv_heads=kv_heads, head_dim=head_dim)
    for heads in HEADS[:4]:
        yield from _attentions(heads, dtype="float16")
    for kv_dtype in ("int8", "float8_e4m3fn"):
        yield from _attentions(HEADS[0], kv_dtype=kv_dtype)
        yield from _attentions(HEADS[0], kv_dtype=kv_dtype, scaled=True)
    for page_size in (16, 32, 128):
        for heads in HEADS[:3]:
            yield from _attentions(heads, page_size=page_size)


def _attentions(heads: tuple[int, int, int], **options: Any) -> Iterator[Attention]:
    """A step of decodes, one of chunks, and one of both."""
    shape = dict(zip(("heads", "kv_heads", "head_dim"), heads), **options)
    decodes, chunks = (200,), ((300, 100),)
    yield Attention(decodes, **shape)
    yield Attention((), chunks, **shape)
    yield Attention(decodes, chunks, **shape)


class Asked:
    """Stands in for `self_check.why_not`: notes what was asked for, and trusts.

    A benchmark looks at results itself, and wants to know how fast even a wrong kernel is.
    """

    def __init__(self) -> None:
        self._noted: dict[tuple[str, str], self_check.SelfCheck] = {}

    def __call__(self, operation: str, device_kind: str, shapes: str, check: self_check.SelfCheck):
        self._noted[operation, shapes] = check

    def take(self) -> dict[tuple[str, str], self_check.SelfCheck]:
        """(operation, class) noted since the last time -> the check of its kernel."""
        taken, self._noted = self._noted, {}
        return taken


asked = Asked()


def needed(problem: Problem) -> dict[tuple[str, str], self_check.SelfCheck]:
    """(operation, class) that a problem asks for -> the check of its kernel; nothing is run.

    Raises ValueError where a kernel refuses it.
    """
    make = Shapes(None)
    asked.take()
    jax.eval_shape(problem.kernel, problem.carry(make), problem.inputs(make))
    return asked.take()


def tried(spec: Attention | PageMove | PackedMatmul | ResidualNorm) -> dict[str, Any]:
    """If a check was right of each of the classes that a case asks for."""
    try:
        checks = needed(spec.problem())
    except ValueError as error:
        return {"status": "refused", "why": str(error)}
    against = [why for check in checks.values() if (why := check.run())]
    return {"status": "wrong", "why": " ".join(against)} if against else {}


def verified(
    known: Mapping[str, Any],
    device_kind: str,
    fingerprint: str,
    records: Iterable[Mapping[str, Any]],
) -> dict[str, Any]:
    """`verified.json` as it is, with what records of these sources and compilers (see
    `self_check.fingerprint`) say about a kind of device.

    A class is added that was found right, by its check or at real shapes, and taken out where it
    was wrong, failed, or crashed its process. Other fingerprints of that kind of device go: what is
    installed has one.
    """
    right, wrong = set(), set()
    for record in records:
        if record["part"].startswith("peers") or record.get("fingerprint") != fingerprint:
            continue
        own = {tuple(each) for each in record.get("classes", ())}
        if record["status"] == "done":
            right |= own
        elif record["status"] in ("wrong", "failed", "crashed"):
            wrong |= own
    merged = json.loads(json.dumps(known))
    before = merged.get(device_kind, {}).get(fingerprint, {})
    right |= {(name, shapes) for name, classes in before.items() for shapes in classes}
    found: dict[str, list[str]] = {}
    for name, shapes in sorted(right - wrong):
        found.setdefault(name, []).append(shapes)
    merged[device_kind] = {fingerprint: found}
    return merged
