"""Engines on meshes of virtual devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import family_members
from scripts import run_on_eight_devices
from tiny_checkpoints import CONFIG, hf_shapes, write_hf
from tiny_engines import CONTEXT, EOS, TinyModel
from unoptimised import XLA_FLAGS

from jaxserve.llm import LLM
from jaxserve.models.loading.checkpoint import Checkpoint
from sharding_rules import HeadLayout

DEGREES = {
    "TP": "tensor_parallel_size",
    "PP": "pipeline_parallel_size",
    "CP": "context_parallel_size",
}
SEQS = 2
PAGE_SIZE = 8
# On a busy machine the threads of all devices may be long in coming together.
_PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=400"


def degrees(mesh: str) -> dict[str, int]:
    """Settings of a mesh that is written as "TP2 CP4"; those not named are 1."""
    named = {DEGREES[part[:2]]: int(part[2:]) for part in mesh.split()}
    return dict.fromkeys(DEGREES.values(), 1) | named


def on_mesh(
    mesh: str, check: Callable[..., Any], *arguments: Any, optimised: bool = False, **named: Any
) -> None:
    """Runs `check(mesh, ...)` in a process that has eight devices. `optimised`: with the programs
    that users run, which take longer to compile."""
    flags = _PATIENT if optimised else f"{XLA_FLAGS} {_PATIENT}"
    run_on_eight_devices(check, mesh, *arguments, xla_flags=flags, **named)


def write_llama(directory: Path, **fields: Any) -> Path:
    """A tiny Llama with these fields in its config."""
    raw = CONFIG | {"max_position_embeddings": CONTEXT, "eos_token_id": EOS} | fields
    return write_hf(directory, raw, family_members.tensors(hf_shapes(raw)))


def load(
    model: TinyModel | Checkpoint, mesh: str, *, pages: int | None = None, **changes: Any
) -> LLM:
    """An engine of few programs, whose pool has little more than one longest request needs."""
    sizes = degrees(mesh)
    config, tensor = model.config, sizes["tensor_parallel_size"]
    settings = {
        "max_model_len": CONTEXT,
        "max_num_seqs": SEQS,
        "page_size": PAGE_SIZE,
        "program_scope": "step",
    } | changes
    settings.setdefault("max_num_batched_tokens", settings["max_num_seqs"] + 16)
    page_size = settings["page_size"]
    pages = pages or 1 + -(-CONTEXT // page_size) + 1
    heads = HeadLayout(config.num_heads, config.num_kv_heads, tensor).kv_heads
    token_bytes = config.kv_bytes_per_token(4)
    if isinstance(model, TinyModel) and model.is_quantized:
        token_bytes = model.token_bytes
        settings["kv_cache_dtype"] = model.kv_cache_dtype
    whole_page_bytes = token_bytes // config.num_kv_heads * heads * page_size
    settings["kv_cache_memory_bytes"] = pages * whole_page_bytes // math.prod(sizes.values())
    if "host_pages" in settings:
        settings["host_kv_bytes"] = settings.pop("host_pages") * whole_page_bytes
    return LLM(model.path, **sizes, **settings)
