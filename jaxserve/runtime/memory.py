"""What the engine will take of a device's memory, added up before any of it is taken."""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp

from jaxserve.config import EngineConfig
from jaxserve.errors import MemoryPlanError
from jaxserve.kv.transfers import MOVE_PAGES
from jaxserve.models.config import ModelConfig

_CPU_KV_BYTES = 2 << 30
_HOST_SHARE = 4
"""By default, lower KV tiers take no more of the host's free memory than one part in this many."""
STAGING_BUFFERS = 2
"""Moves that can hold device memory at once, to lower tiers, and as many from them."""
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device by purpose. `scratch_bytes` is the hungriest program's temporaries and
    results, as XLA states them; a guess until the programs are compiled.

    A page lies on `num_devices` in equal parts, of `page_bytes` each. `host_pages` and `disk_pages`
    are those of the tiers below the devices, where pages lie whole; on CPUs the host's are taken
    from the same memory as all else. `pool_limit_bytes` is what the pool may take of the memory, 0
    for all of it. The plan may be of more than there is: look at `fits`.
    """

    limit_bytes: int
    weights_bytes: int
    state_bytes: int
    scratch_bytes: int
    page_bytes: int
    num_pages: int
    page_size: int
    host_pages: int = 0
    disk_pages: int = 0
    host_is_device: bool = False
    num_devices: int = 1
    pool_limit_bytes: int = 0

    @property
    def kv_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def image_bytes(self) -> int:
        """Bytes of a whole page."""
        return self.num_devices * self.page_bytes

    @property
    def host_bytes(self) -> int:
        return self.host_pages * self.image_bytes

    @property
    def disk_bytes(self) -> int:
        return self.disk_pages * self.image_bytes

    @property
    def staging_bytes(self) -> int:
        """Buffers for pages on their way between the device and other tiers."""
        if not self.host_pages and not self.disk_pages:
            return 0
        return 2 * STAGING_BUFFERS * MOVE_PAGES * self.page_bytes

    @property
    def fixed_bytes(self) -> int:
        """All but the KV pool."""
        host_bytes = self.host_bytes // self.num_devices if self.host_is_device else 0
        return (
            self.weights_bytes
            + self.state_bytes
            + self.scratch_bytes
            + self.staging_bytes
            + host_bytes
        )

    @property
    def total_bytes(self) -> int:
        return self.fixed_bytes + self.kv_bytes

    @property
    def kv_tokens(self) -> int:
        """Tokens the pool holds; page 0 is trash."""
        return (self.num_pages - 1) * self.page_size

    @property
    def room_bytes(self) -> int:
        """What a KV pool may take; negative where even the rest does not fit."""
        room = self.limit_bytes - self.fixed_bytes
        return min(room, self.pool_limit_bytes) if self.pool_limit_bytes else room

    @property
    def fits(self) -> bool:
        return self.kv_bytes <= self.room_bytes

    def needs(self) -> str:
        """What is needed, and of what, where that is more than there is."""
        lower = self.fixed_bytes - self.weights_bytes - self.state_bytes - self.scratch_bytes
        text = (
            f"needs {_gib(self.total_bytes)} (weights {_gib(self.weights_bytes)}, KV pool "
            f"{_gib(self.kv_bytes)}, lower tiers {_gib(lower)}, page tables and sampling "
            f"state {_gib(self.state_bytes)}, program scratch {_gib(self.scratch_bytes)})"
        )
        if self.total_bytes > self.limit_bytes:
            return f"{text}, but {_gib(self.limit_bytes)} may be used"
        return f"{text}, but a KV pool may take {_gib(self.pool_limit_bytes)} by default"

    def check(self) -> None:
        """Raises MemoryPlanError unless everything fits, with the largest pool that would."""
        if self.fits:
            return
        pages = self.room_bytes // self.page_bytes
        way = "a smaller max_num_batched_tokens, max_num_seqs or host_kv_bytes is needed"
        if pages >= 2:
            way = f"kv_cache_memory_bytes of at most {pages * self.page_bytes} would fit"
        raise MemoryPlanError(f"The engine {self.needs()}; {way}.")


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    weights_bytes: int,
    state_bytes: int,
    device: jax.Device,
) -> MemoryPlan:
    """Decide the KV pool of a resolved config, before programs are compiled.

    Where `kv_cache_memory_bytes` does not say, the pool has at least the pages of one request of
    max_model_len; whether they fit is for the caller to see. Raises MemoryPlanError for settings
    of pools that contradict themselves or the host's memory.
    """
    itemsize = jnp.dtype(config.dtype).itemsize
    num_devices = config.num_devices
    image_bytes = model.kv_bytes_per_token(itemsize) * config.page_size
    page_bytes = image_bytes // num_devices
    pages_of_one = -(-config.max_model_len // config.page_size)
    limit = int(device_memory(device) * config.memory_utilization)
    on_cpu = device.platform == "cpu"
    if on_cpu:  # All devices of a host share its memory.
        limit //= max(num_devices // jax.process_count(), 1)
    scratch = _scratch_guess(config, model, itemsize)
    host_pages = _lower_pages("host_kv_bytes", config.host_kv_bytes or 0, image_bytes)
    if config.host_kv_bytes is None and not on_cpu:  # Its buffers are taken before the pool.
        host_pages = host_memory() // _HOST_SHARE // image_bytes
    plan = MemoryPlan(
        limit_bytes=limit,
        weights_bytes=weights_bytes,
        state_bytes=state_bytes,
        scratch_bytes=scratch,
        page_bytes=page_bytes,
        num_pages=0,
        page_size=config.page_size,
        host_pages=host_pages,
        disk_pages=_lower_pages("disk_kv_bytes", config.disk_kv_bytes, image_bytes),
        host_is_device=on_cpu,
        num_devices=num_devices,
    )
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
        if on_cpu:
            plan = dataclasses.replace(plan, pool_limit_bytes=_CPU_KV_BYTES // num_devices)
        most = config.max_num_seqs * pages_of_one + 1
        num_pages = min(most, max(plan.room_bytes // page_bytes, pages_of_one + 1))
    plan = dataclasses.replace(plan, num_pages=num_pages)
    if config.host_kv_bytes is None:
        plan = dataclasses.replace(plan, host_pages=min(host_pages, num_pages))
    if config.preemption == "swap" and not plan.host_pages and not plan.disk_pages:
        raise MemoryPlanError(
            "preemption is 'swap', but there is no tier to swap to; set host_kv_bytes, or "
            "disk_kv_bytes and disk_kv_dir."
        )
    if plan.host_bytes > host_memory():
        raise MemoryPlanError(
            f"host_kv_bytes is {config.host_kv_bytes}, but {host_memory()} bytes of the host's "
            "memory are free; set it to less than that."
        )
    return plan


def _lower_pages(setting: str, num_bytes: int, page_bytes: int) -> int:
    """Pages of a tier below the device. Raises MemoryPlanError for a budget of less than one."""
    if 0 < num_bytes < page_bytes:
        raise MemoryPlanError(
            f"{setting} is {num_bytes}, less than one page of {page_bytes} bytes; give it at "
            "least that, or 0 for none."
        )
    return num_bytes // page_bytes


def device_memory(device: jax.Device) -> int:
    """Bytes of memory that could be used on `device`; on a CPU, those free on the host now."""
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit") or host_memory()


def host_memory() -> int:
    """Bytes of the host's memory that are free now."""
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
