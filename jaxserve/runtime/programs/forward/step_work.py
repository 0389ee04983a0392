"""What a step asks of one device of a planned engine, from the specs of its model."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import Sharding

from jaxserve.core.model_config import ModelConfig
from jaxserve.core.steps.work import ChunkWork, DraftWork, StepWork
from jaxserve.models.family import AnySpec
from jaxserve.runtime.hardware.arrays import shard_bytes
from jaxserve.runtime.programs.forward import latent_chunks
from jaxserve.runtime.programs.shapes.params import ParamShapes
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from jaxserve.scheduler.decode_groups import PrefixCost
from pallas_kernels.quantized_matmul import QuantizedWeight

CPU_ONCE, CPU_IN_GROUP, CPU_GROUP = 2.0, 0.34, 128.0
"""Times on CPUs, next to that of a decode that reads one token alone: of a token for a group and
for each of its decodes, and of a group (docs/decisions/018-shared-prefixes.md)."""
GROUP_TILE = 128.0
"""Keys that a kernel reads together, at least."""


def step_work(shapes: ProgramShapes) -> StepWork:
    """The share of one device in every step."""
    local, page = shapes.local_model, shapes.kv.pages
    work = dataclasses.replace(
        _work(shapes, shapes.params, local),
        kv_bytes=page.page_bytes // page.page_size,
        tensor=shapes.tensor,
        stages=shapes.stages,
        seq=shapes.seq,
    )
    adapters = [shard_bytes(array) for array in jax.tree.leaves(shapes.adapters.abstract)]
    return dataclasses.replace(
        work,
        layer_weights=work.layer_weights + sum(adapters) // shapes.dtype.itemsize,
        layer_bytes=work.layer_bytes + sum(adapters),
    )


def draft_work(shapes: ProgramShapes) -> DraftWork | None:
    """What drafting computes; None without speculation, and for methods that only look tokens up
    (`runtime/proposers/` has them all)."""
    speculative = shapes.config.speculative_config
    if speculative is None or not speculative.computed:
        return None
    target = dataclasses.replace(step_work(shapes), stages=1, seq=1)
    if shapes.medusa is not None:
        weights, num_bytes = _total(
            size for _, size in _sizes(shapes.draft_params, shapes.draft_params.specs)
        )
        heads = shapes.medusa.num_heads
        return DraftWork(
            dataclasses.replace(
                target,
                windows={},
                layer_weights=weights // heads,
                layer_bytes=num_bytes // heads,
                expert_weights=0,
                expert_bytes=0,
            )
        )
    local = shapes.local_draft_model
    if local is None:  # The first layers of the model itself.
        share = speculative.num_layers / target.num_layers
        return DraftWork(
            dataclasses.replace(
                target,
                windows=collections.Counter(shapes.model.sliding_windows[: speculative.num_layers]),
                layer_weights=round(share * target.layer_weights),
                layer_bytes=round(share * target.layer_bytes),
                expert_weights=round(share * target.expert_weights),
                expert_bytes=round(share * target.expert_bytes),
            )
        )
    page, each = shapes.kv.pages_of(local), _work(shapes, shapes.draft_params, local)
    each = dataclasses.replace(
        each,
        kv_bytes=page.page_bytes // page.page_size,
        tensor=shapes.tensor,
    )
    if shapes.feature_layer:  # A layer, before the head of the model unless it has one of its own.
        if "lm_head" not in shapes.draft_params.specs:
            head = {"head_weights": target.head_weights, "head_bytes": target.head_bytes}
            each = dataclasses.replace(each, **head)
        return DraftWork(each, prompts=True)
    return DraftWork(each, tokens=2, always=True, prompts=True)


def _work(shapes: ProgramShapes, params: ParamShapes, local: ModelConfig) -> StepWork:
    """What a model computes on one device, without the size of its KV and its mesh."""
    # An embedding is the head, or as large.
    rest = _sizes(params, [name for name in params.specs if name != "layers"])
    vocabulary = (size for spec, size in rest if "vocab" in spec.axes)
    head_weights, head_bytes = max(vocabulary, default=(0, 0))
    layers = _sizes(params, ["layers"])
    expert_weights, expert_bytes = _total(size for spec, size in layers if _of_experts(spec))
    layer_weights, layer_bytes = _total(size for spec, size in layers if not _of_experts(spec))
    moe = local.moe
    return StepWork(
        dtype=shapes.config.dtype,
        itemsize=shapes.dtype.itemsize,
        hidden_size=local.hidden_size,
        windows=collections.Counter(local.sliding_windows),
        layer_weights=layer_weights,
        layer_bytes=layer_bytes,
        expert_weights=expert_weights,
        expert_bytes=expert_bytes,
        expert_share=1.0 if moe is None else moe.num_experts_per_tok / moe.num_experts,
        head_weights=head_weights,
        head_bytes=head_bytes,
        query_size=local.num_heads * (local.head_dim + local.value_dim) // 2,
        kv_bytes=0,
        chunks=_chunk_work(shapes, local),
    )


def _chunk_work(shapes: ProgramShapes, local: ModelConfig) -> ChunkWork | None:
    """Of a model that attends to latents; None where its prefill chunks do so too."""
    mla, layouts = local.mla, shapes.layouts.values()
    least = {latent_chunks.uncompressed_from(mla, layout) for layout in layouts} - {None}
    if not least:
        return None
    of_head = mla.nope_dim + mla.value_dim
    return ChunkWork(
        least=min(least),
        query_size=local.num_heads * (of_head + mla.rope_dim) // 2,
        weights=local.num_heads * of_head * mla.kv_rank,
    )


def _sizes(params: ParamShapes, names: Iterable[str]) -> list[tuple[AnySpec, tuple[int, int]]]:
    """The specs of parts of a model, each with its weights and bytes on one device."""
    found = []
    for name in names:
        specs, structure = jax.tree.flatten(params.specs[name])
        shardings = structure.flatten_up_to(params.shardings[name])
        arrays = structure.flatten_up_to(params.abstract[name])
        found += [(spec, _size(spec, *rest)) for spec, *rest in zip(specs, shardings, arrays)]
    return found


def prefix_cost(shapes: ProgramShapes) -> PrefixCost | None:
    """What groups of decodes cost on the planned devices; None if programs have none.

    On CPUs by measurement (docs/decisions/018-shared-prefixes.md), elsewhere by bytes alone, with a
    tile of keys a group: there products of queries and shared keys hide behind the reading.
    """
    if not shapes.shares_prefixes:
        return None
    work, page = step_work(shapes), shapes.kv.pages
    # Queries are read again, and a result is written, then both are read.
    merged = 4 * work.query_size * work.itemsize / work.kv_bytes
    on_cpu = shapes.device.platform == "cpu"
    layers = sum(
        place.group == 0 and window is None
        for place, window in zip(shapes.kv_layout.places, shapes.local_model.sliding_windows)
    )
    return PrefixCost(
        once=CPU_ONCE if on_cpu else 1.0,
        in_group=CPU_IN_GROUP if on_cpu else 0.0,
        row=merged,
        group=CPU_GROUP if on_cpu else GROUP_TILE,
        token_bytes=page.page_bytes // page.page_size * layers * shapes.tensor * shapes.stages,
    )


def _size(spec: AnySpec, sharding: Sharding | QuantizedWeight, arrays: Any) -> tuple[int, int]:
    """Weights and bytes of a parameter on one device."""
    num_bytes = sum(map(shard_bytes, jax.tree.leaves(arrays)))
    if isinstance(sharding, Sharding):
        return math.prod(sharding.shard_shape(spec.shape)), num_bytes
    values = arrays.values
    return spec.size * shard_bytes(values) // (values.size * values.dtype.itemsize), num_bytes


def _total(sizes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    weights, num_bytes = zip((0, 0), *sizes)
    return sum(weights), sum(num_bytes)


def _of_experts(spec: AnySpec) -> bool:
    return "experts" in spec.axes
