"""Alternatives for settings that do not fit; each is planned before it is offered."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable
from typing import Any, get_args

from jaxserve.core.errors import MemoryPlanError
from jaxserve.core.settings.choices import Quantization
from jaxserve.core.settings.config import EngineConfig
from jaxserve.runtime.planning.memory import MemoryPlan, gib

Changes = dict[str, Any]
PlanOf = Callable[[Changes], MemoryPlan | None]
"""The memory plan, whether it fits or not, of a config with these changes; None if the changes are
invalid for another reason."""

_SPARE = 1.02
"""Margin of an offered memory_utilization, since free memory changes."""


def refusal(needs: str, config: EngineConfig, plan_of: PlanOf, num_devices: int) -> MemoryPlanError:
    """The error for a resolved `config` that does not fit, with alternatives that do.

    `needs` is a sentence about what it needs. `num_devices` are there for engines of this process;
    0 if the devices belong to several processes, which cannot choose how many.
    """
    found = alternatives(config, plan_of, num_devices)
    text = needs
    if config.kv_cache_memory_bytes is None:
        text += f" The KV pool must hold a request of max_model_len {config.max_model_len}."
    if found:
        text += f" What fits: {in_words(found)}."
    else:
        weights = weights_of(plan_of).items()
        sizes = ", ".join(f"{name} {gib(num_bytes)}" for name, num_bytes in weights)
        text += " No other max_model_len, quantization or number of these devices fits"
        text += f" (weights: {sizes})." if sizes else "."
    size = devices_needed(config, plan_of)
    if size is not None and num_devices:
        more = dataclasses.replace(config, tensor_parallel_size=size, devices=None)
        if more.num_devices > num_devices:
            text += f" tensor_parallel_size {size} would fit {more.num_devices} such devices."
    return MemoryPlanError(text, found)


def alternatives(config: EngineConfig, plan_of: PlanOf, num_devices: int) -> list[Changes]:
    """Changes that make a resolved `config` fit that does not.

    First a shorter context (a smaller pool, if its size was set), then changes that allow a longer
    one: other quantizations and dtypes, quantized KV, more of the `num_devices` available devices,
    fewer sequences, no host tier. Then a larger share of the memory. Last, where no pool fits,
    streamed weights.
    """
    as_it_is = plan_of({})
    shorter = _fitted(config, {}, plan_of)
    others: list[Changes | None] = []
    for quantization in get_args(Quantization):
        if quantization != config.quantization:
            others.append(_fitted(config, {"quantization": quantization}, plan_of))
    if config.dtype == "float32":
        others.append(_fitted(config, {"dtype": "bfloat16"}, plan_of))
    if config.kv_cache_dtype == "auto":
        others.append(_fitted(config, {"kv_cache_dtype": "int8"}, plan_of))
    others.append(_parallel(config, plan_of, num_devices))
    if config.max_num_seqs > 1:
        others.append(_fitted(config, {"max_num_seqs": 1}, plan_of))
    if as_it_is.host_pages and not as_it_is.kv_on_host:
        others.append(_fitted(config, {"host_kv_bytes": 0}, plan_of))
    for changes in _more_memory(config, as_it_is):
        memory = plan_of(changes)
        others.append(changes if memory and memory.fits else None)
    if shorter is None and config.weights_on == "device":  # The weights are too large.
        others += [_fitted(config, {"weights_on": tier}, plan_of) for tier in ("host", "disk")]
    found = [changes for changes in others if changes and _better(changes, shorter)]
    return [shorter, *found] if shorter else found


def _better(changes: Changes, shorter: Changes | None) -> bool:
    """Whether an alternative allows a longer context, or larger pool, than `shorter`."""
    return not shorter or all(changes.get(name, math.inf) > shorter[name] for name in shorter)


def devices_needed(config: EngineConfig, plan_of: PlanOf, most: int = 1024) -> int | None:
    """The smallest tensor_parallel_size, a power of two, with which an unquantized `config` fits
    devices like these; None if there is none up to `most`."""
    size = 2 * config.tensor_parallel_size
    while size <= most:
        memory = plan_of({"tensor_parallel_size": size, "devices": None})
        if memory is not None and memory.fits:
            return size
        size *= 2
    return None


def weights_of(plan_of: PlanOf) -> dict[str, int]:
    """Bytes of the weights on one device, for each quantization that the model supports."""
    weights = {}
    for quantization in get_args(Quantization):
        memory = plan_of({"quantization": quantization})
        if memory is not None:
            weights[quantization] = memory.weights_bytes
    return weights


def _fitted(config: EngineConfig, changes: Changes, plan_of: PlanOf) -> Changes | None:
    """`changes`, plus the longest context or largest pool that fits if they do not suffice; None if
    nothing fits."""
    memory = plan_of(changes)
    if memory is None or memory.fits:
        return changes if memory else None

    def with_pages(pages: int) -> Changes:
        if config.kv_cache_memory_bytes is not None:
            return changes | {"kv_cache_memory_bytes": pages * memory.page_bytes}
        return changes | {"max_model_len": memory.layout.longest(pages - 1, config.max_model_len)}

    def too_many(pages: int) -> bool:
        smaller = plan_of(with_pages(pages))
        return smaller is None or not smaller.fits

    # More pages may fit than room_bytes says: a shorter context has smaller page tables.
    pages = bisect.bisect(range(2, memory.num_pages), False, key=too_many) + 1
    return with_pages(pages) if pages >= 2 else None


def _parallel(config: EngineConfig, plan_of: PlanOf, num_devices: int) -> Changes | None:
    """The fewest available devices that fit the whole context; if none do, as many as possible."""
    if config.devices is not None:
        return None
    others = config.num_devices // config.tensor_parallel_size
    best = None
    size = 2 * config.tensor_parallel_size
    while size * others <= num_devices:
        best = _fitted(config, {"tensor_parallel_size": size}, plan_of) or best
        if best == {"tensor_parallel_size": size}:
            break
        size *= 2
    return best


def _more_memory(config: EngineConfig, memory: MemoryPlan) -> list[Changes]:
    """Larger shares of the memory, if possible."""
    found: list[Changes] = []
    share = config.memory_utilization * memory.total_bytes / max(memory.limit_bytes, 1)
    share = math.ceil(100 * _SPARE * share) / 100
    if config.memory_utilization < share <= 1:
        found.append({"memory_utilization": share})
    if memory.total_bytes <= memory.limit_bytes:
        found.append({"kv_cache_memory_bytes": memory.kv_bytes})
    return found


def in_words(found: list[Changes]) -> str:
    """Alternatives as part of a sentence."""
    return "; ".join(
        " with ".join(f"{name} {value}" for name, value in changes.items()) for changes in found
    )
