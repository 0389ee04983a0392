"""The classes of shapes that `verified.json` is to know, the most common first."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from device.attention import Attention
from device.packed_weights import PackedMatmul
from device.page_moves import PageMove, possible
from device.problem import Shapes
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
FORMATS = (
    *GGUF.values(),
    *(Format("int4", group, scale_dtype="bfloat16") for group in (32, 128)),
    Format("int8", None),
    FP8,
)


def specs(only: tuple[str, ...]) -> Iterator[Attention | PageMove | PackedMatmul]:
    """A small case of each class of operations asked for, all unless any, that this JAX can do."""
    for spec in _all():
        if (not only or spec.op in only) and possible(spec):
            yield spec


def _all() -> Iterator[Attention | PageMove | PackedMatmul]:
    for heads in HEADS:
        yield from _attentions(heads)
    for heads in CAPPED:
        yield from _attentions(heads, soft_cap=50.0)
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
        self._noted: dict[tuple[str, str], Callable[[], str | None]] = {}

    def __call__(self, operation, device_kind, shapes, kernel, xla, check_case):
        self._noted[operation, shapes] = functools.partial(
            self_check.disagreement, kernel, xla, check_case
        )

    def take(self) -> dict[tuple[str, str], Callable[[], str | None]]:
        """(operation, class) noted since the last time -> what says if its kernel is wrong."""
        taken, self._noted = self._noted, {}
        return taken


asked = Asked()


def tried(spec: Attention | PageMove | PackedMatmul) -> dict[str, Any]:
    """The classes that a case asks for, and if a trial of each was right."""
    problem, make = spec.problem(), Shapes(None)
    try:
        jax.eval_shape(problem.kernel, problem.carry(make), problem.inputs(make))
    except ValueError as error:
        return {"status": "refused", "why": str(error)}
    check_cases = asked.take()
    against = [why for check_case in check_cases.values() if (why := check_case())]
    outcome = {"status": "wrong", "why": " ".join(against)} if against else {}
    return {"classes": [*check_cases], **outcome}


def verified(
    known: Mapping[str, Any], device_kind: str, records: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """`verified.json` as it is, with what records say about this JAX on a kind of device.

    A class is added that was found right by its trial, and taken out where a trial or a case of
    its shapes was wrong or failed. Where a process crashed, it is unknown which classes did that,
    and nothing changes.
    """
    right, wrong = set(), set()
    for record in records:
        ours = not record["part"].startswith("peers")
        if ours and record["status"] == "crashed":
            return known
        if record["part"].startswith("classes") and record["status"] == "done":
            right |= {tuple(each) for each in record["classes"]}
        elif ours and record["status"] in ("wrong", "failed"):
            wrong |= {tuple(each) for each in record["classes"]}
    merged = json.loads(json.dumps(known))
    operations = merged.setdefault(device_kind, {}).setdefault(jax.__version__, {})
    for operation in {name for name, _ in right | wrong} | {*operations}:
        found = {(operation, shapes) for shapes in operations.get(operation, ())} | right
        operations[operation] = sorted(
            shapes for name, shapes in found - wrong if name == operation
        )
    return merged
