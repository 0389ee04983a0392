"""What a step asks of one device of a planned engine, from the specs of its model."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable
from typing import Any

import jax
from jax.sharding import Sharding

from jaxserve.core.steps.work import StepWork
from jaxserve.models.family import AnySpec
from jaxserve.runtime.programs.shapes.arrays import shard_bytes
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

    def sizes(name: str) -> list[tuple[AnySpec, tuple[int, int]]]:
        """The specs of a part of the model, each with its weights and bytes on one device."""
        specs, structure = jax.tree.flatten(shapes.specs[name])
        shardings = structure.flatten_up_to(shapes.params.shardings[name])
        arrays = structure.flatten_up_to(shapes.params.abstract[name])
        return [(spec, _size(spec, *rest)) for spec, *rest in zip(specs, shardings, arrays)]

    names = [name for name in shapes.specs if name != "layers"]
    # An embedding is the head, or as large.
    head_weights, head_bytes = max(
        size for name in names for spec, size in sizes(name) if "vocab" in spec.axes
    )
    layers, local = sizes("layers"), shapes.local_model
    expert_weights, expert_bytes = _total(size for spec, size in layers if _of_experts(spec))
    layer_weights, layer_bytes = _total(size for spec, size in layers if not _of_experts(spec))
    for array in jax.tree.leaves(shapes.adapters.abstract):
        num_bytes = shard_bytes(array)
        layer_weights += num_bytes // array.dtype.itemsize
        layer_bytes += num_bytes
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
        kv_bytes=shapes.kv.pages.page_bytes // shapes.kv.pages.page_size,
        tensor=shapes.tensor,
        stages=shapes.stages,
        seq=shapes.seq,
    )


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
