"""What the engine will take of a device's memory, added up before any of it is taken."""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp

from jaxserve.config import EngineConfig
from jaxserve.errors import MemoryPlanError
from jaxserve.models.config import ModelConfig
from jaxserve.models.family import Params

_CPU_KV_BYTES = 2 << 30
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose. `scratch_bytes` is the hungriest program's temporaries and results,
    as XLA states them; a guess until the programs are compiled."""

    limit_bytes: int
    weights_bytes: int
    state_bytes: int
    scratch_bytes: int
    page_bytes: int
    num_pages: int
    page_size: int

    @property
    def kv_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.state_bytes + self.scratch_bytes + self.kv_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens the pool holds; page 0 is trash."""
        return (self.num_pages - 1) * self.page_size

    def check(self) -> None:
        """Raises MemoryPlanError unless everything fits, saying what would."""
        if self.total_bytes <= self.limit_bytes:
            return
        fixed = self.weights_bytes + self.state_bytes + self.scratch_bytes
        room = self.limit_bytes - fixed
        if room >= 2 * self.page_bytes:
            way = f"kv_cache_memory_bytes of at most {room // self.page_bytes * self.page_bytes}"
        else:
            way = "a smaller model, dtype, max_num_seqs or max_num_batched_tokens"
        raise MemoryPlanError(
            f"needs {_gib(self.total_bytes)} (weights {_gib(self.weights_bytes)}, KV pool "
            f"{_gib(self.kv_bytes)}, sampling state {_gib(self.state_bytes)}, program scratch "
            f"{_gib(self.scratch_bytes)}), but {_gib(self.limit_bytes)} may be used; "
            f"{way} would fit."
        )


def plan_memory(
    config: EngineConfig, model: ModelConfig, specs: Params, state_bytes: int, device: jax.Device
) -> MemoryPlan:
    """Decide the KV pool of a resolved config, before programs are compiled.

    Raises MemoryPlanError when weights and a pool of one full-length sequence do not fit (a
    smaller pool may be asked for by `kv_cache_memory_bytes`).
    """
    itemsize = jnp.dtype(config.dtype).itemsize
    weights_bytes = sum(spec.size for spec in jax.tree.leaves(specs)) * itemsize
    page_bytes = model.kv_bytes_per_token(itemsize) * config.page_size
    pages_of_one = -(-config.max_model_len // config.page_size)
    limit = int(device_memory(device) * config.memory_utilization)
    scratch = _scratch_guess(config, model, itemsize)
    left = limit - weights_bytes - state_bytes - scratch
    if config.kv_cache_memory_bytes is not None:
        num_pages = config.kv_cache_memory_bytes // page_bytes
        if num_pages < 2:
            raise MemoryPlanError(
                f"kv_cache_memory_bytes {config.kv_cache_memory_bytes} holds {num_pages} pages of "
                f"{page_bytes} bytes; at least 2 are needed ({2 * page_bytes} bytes), and "
                f"{(pages_of_one + 1) * page_bytes} bytes for one request of max_model_len "
                f"{config.max_model_len} tokens."
            )
    else:
        most = config.max_num_seqs * pages_of_one + 1
        share = min(left, _CPU_KV_BYTES) if device.platform == "cpu" else left
        num_pages = min(most, max(share, 0) // page_bytes)
        if num_pages < pages_of_one + 1:
            tokens = max(0, num_pages - 1) * config.page_size
            raise MemoryPlanError(
                f"a request of max_model_len {config.max_model_len} tokens needs "
                f"{_gib((pages_of_one + 1) * page_bytes)} of KV pages, but {_gib(max(share, 0))} "
                f"are left for them; set max_model_len to at most {tokens}, or "
                "kv_cache_memory_bytes to the pool you want."
            )
    return MemoryPlan(
        limit_bytes=limit,
        weights_bytes=weights_bytes,
        state_bytes=state_bytes,
        scratch_bytes=scratch,
        page_bytes=page_bytes,
        num_pages=num_pages,
        page_size=config.page_size,
    )


def device_memory(device: jax.Device) -> int:
    """Bytes of memory that could be used on `device`; on a CPU, those free on the host now."""
    stats = device.memory_stats() or {}
    if limit := stats.get("bytes_limit"):
        return limit
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _scratch_guess(config: EngineConfig, model: ModelConfig, itemsize: int) -> int:
    """Temporaries of the largest step: activations of a few layers' width, logits of all rows."""
    widest = 4 * model.hidden_size + 3 * model.intermediate_size
    activations = config.max_num_batched_tokens * widest * max(itemsize, 4)
    return activations + 4 * config.max_num_seqs * model.vocab_size * 4


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
