"""Memory plan: what the engine allocates on a device, computed before any allocation."""

from __future__ import annotations

import dataclasses
import os

import jax
import jax.numpy as jnp

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import MemoryPlanError
from jaxserve.core.model_config import ModelConfig
from jaxserve.kv.layout import KVLayout
from jaxserve.kv.transfers import MOVE_PAGES

_CPU_KV_BYTES = 2 << 30
_HOST_SHARE = 4
"""By default, lower KV tiers take at most 1 / _HOST_SHARE of the host's free memory."""
STAGING_BUFFERS = 2
"""Concurrent transfers that may hold device memory, in each direction."""
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device by purpose. `scratch_bytes` is the largest program's temporaries and
    results, as XLA reports them; an estimate until the programs are compiled.

    A page, of any KV group of `layout`, is split over `num_devices` into equal parts of
    `page_bytes` each. `host_pages` and `disk_pages` are whole pages of the lower tiers; on CPUs the
    host tier uses the same memory as everything else. `pool_limit_bytes` limits the pool, 0 for no
    limit. The plan may exceed the available memory: check `fits`.
    """

    limit_bytes: int
    weights_bytes: int
    state_bytes: int
    scratch_bytes: int
    page_bytes: int
    num_pages: int
    layout: KVLayout
    host_pages: int = 0
    disk_pages: int = 0
    host_is_device: bool = False
    num_devices: int = 1
    pool_limit_bytes: int = 0

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.layout.page_size

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
        """Buffers for page transfers between the device and other tiers."""
        if not self.host_pages and not self.disk_pages:
            return 0
        return 2 * STAGING_BUFFERS * MOVE_PAGES * self.page_bytes

    @property
    def fixed_bytes(self) -> int:
        """Everything but the KV pool."""
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
        """Tokens the pool holds, of sequences within their attention windows; page 0 is trash."""
        return self.tokens_of(self.num_pages)

    def tokens_of(self, num_pages: int) -> int:
        """Tokens that a pool of so many pages holds."""
        return (num_pages - 1) // len(self.layout.groups) * self.page_size

    @property
    def room_bytes(self) -> int:
        """Bytes available to a KV pool; negative if even the rest does not fit."""
        room = self.limit_bytes - self.fixed_bytes
        return min(room, self.pool_limit_bytes) if self.pool_limit_bytes else room

    @property
    def fits(self) -> bool:
        return self.kv_bytes <= self.room_bytes

    def needs(self) -> str:
        """The memory needed by purpose, and the limit that it exceeds."""
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
        """Raises MemoryPlanError, with the largest pool that fits, unless everything fits."""
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
    layout: KVLayout,
    weights_bytes: int,
    state_bytes: int,
    device: jax.Device,
) -> MemoryPlan:
    """Decide the KV pool of a resolved config, before programs are compiled. `layout` has the KV
    groups of a pipeline stage, which are those of all stages.

    Unless `kv_cache_memory_bytes` is set, the pool has at least the pages of one request of
    max_model_len; the caller checks whether they fit. Raises MemoryPlanError for pool settings
    that contradict each other or exceed the host's memory.
    """
    itemsize = jnp.dtype(config.dtype).itemsize
    num_devices = config.num_devices
    layers = layout.layers_per_page * config.pipeline_parallel_size
    image_bytes = model.kv_specs[0].elements * itemsize * layers * config.page_size
    page_bytes = image_bytes // num_devices
    pages_of_one = layout.pages_for(config.max_model_len)
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
        layout=layout,
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
    """Pages of a lower tier. Raises MemoryPlanError for a budget of less than one page."""
    if 0 < num_bytes < page_bytes:
        raise MemoryPlanError(
            f"{setting} is {num_bytes}, less than one page of {page_bytes} bytes; set it to at "
            "least that, or to 0 for no such tier."
        )
    return num_bytes // page_bytes


def device_memory(device: jax.Device) -> int:
    """Bytes of memory usable on `device`; on a CPU, those free on the host now."""
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
    rows = config.max_num_seqs * (1 + config.num_speculative_tokens)
    return activations + 4 * rows * model.vocab_size * 4


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
