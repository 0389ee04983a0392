"""Memory plan: what the engine allocates on a device, computed before any allocation."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.errors import MemoryPlanError
from jaxserve.core.model_config import ModelConfig
from jaxserve.core.settings.config import EngineConfig
from jaxserve.kv.host_pages import HostKV
from jaxserve.kv.layout import TRANSFER_PAGES, KVLayout
from jaxserve.runtime.hardware.device_memory import free_on_host, host_share, usable_memory
from jaxserve.runtime.hardware.devices import DescribedDevice
from jaxserve.runtime.planning.shadow import ShadowSizes
from jaxserve.scheduler.admission import capacity_beside_watermark

_CPU_KV_BYTES = 2 << 30
KV_WINDOW = 2
"""Groups of host pages of a layer on the device at once, with `kv_on` host: one is attended to
while the next is copied."""
KV_GROUP_PAGES = 64
"""Most pages of such a group; it is never larger than what a sequence keeps in the pool."""
STAGING_BUFFERS = 2
"""Concurrent transfers that may hold device memory, in each direction."""
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device by purpose. `scratch_bytes` is the largest program's temporaries and
    results, as XLA reports them; an estimate until the programs are compiled.

    A page, of any KV group of `layout`, is split over `num_devices` into equal parts of
    `page_bytes` each. `host_pages` and `disk_pages` are whole pages of the lower tiers; on CPUs the
    host tier uses the same memory as everything else. With `kv_on_host` the host's pages are those
    of sequences longer than the pool; `shadow` is what the device keeps of these, None for nothing,
    and with `has_kv_window` they are copied to the device.
    `pool_limit_bytes` limits the pool, 0 for no limit. `host_weights_bytes` and
    `disk_weights_bytes` are layers that steps read from there, each device its part. The plan may
    exceed the available memory: check `fits`.
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
    lora_bytes: int = 0
    host_weights_bytes: int = 0
    disk_weights_bytes: int = 0
    kv_on_host: bool = False
    resident_kv_tokens: int | None = None
    shadow: ShadowSizes | None = None
    has_kv_window: bool = True

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.layout.page_size

    @property
    def kv_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def whole_page_bytes(self) -> int:
        """Bytes of a whole page."""
        return self.num_devices * self.page_bytes

    @property
    def host_bytes(self) -> int:
        return self.host_pages * self.whole_page_bytes

    @property
    def disk_bytes(self) -> int:
        return self.disk_pages * self.whole_page_bytes

    @property
    def host_kv(self) -> HostKV | None:
        """What sequences longer than the pool may take; None if these are refused."""
        if not self.kv_on_host:
            return None
        return host_kv(self.layout, self.num_pages, self.host_pages, self.resident_kv_tokens)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sequence that the pool, and the host beside it, have pages for,
        whatever max_model_len is."""
        if self.host_kv is None:
            return self.kv_tokens
        return self.host_kv.longest()

    @property
    def kv_window_bytes(self) -> int:
        """The window that such sequences' host pages pass through, layer by layer."""
        if self.host_kv is None or not self.has_kv_window:
            return 0
        group = group_pages(self.host_kv) if self.num_pages else KV_GROUP_PAGES
        return KV_WINDOW * group * cdiv(self.page_bytes, self.layout.layers_per_page)

    @property
    def shadow_bytes(self) -> int:
        """What the device keeps of compressed host pages."""
        return 0 if self.shadow is None else self.shadow.device_bytes(self.host_pages)

    @property
    def staging_bytes(self) -> int:
        """Buffers for page transfers between the device and other tiers."""
        if self.kv_on_host:
            return self.kv_window_bytes
        if not self.host_pages and not self.disk_pages:
            return 0
        return 2 * STAGING_BUFFERS * TRANSFER_PAGES * self.page_bytes

    @property
    def fixed_bytes(self) -> int:
        """Everything but the KV pool."""
        host_bytes = 0
        if self.host_is_device:
            host_bytes = self.host_bytes // self.num_devices + self.host_weights_bytes
        return (
            self.weights_bytes
            + self.lora_bytes
            + self.state_bytes
            + self.scratch_bytes
            + self.staging_bytes
            + self.shadow_bytes
            + host_bytes
        )

    @property
    def total_bytes(self) -> int:
        return self.fixed_bytes + self.kv_bytes

    @property
    def num_free_pages(self) -> int:
        """Pages that would fit in the memory that nothing takes."""
        return max(0, self.limit_bytes - self.total_bytes) // self.page_bytes

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
        others = self.weights_bytes + self.lora_bytes + self.state_bytes + self.scratch_bytes
        buffers = self.fixed_bytes - others
        weights = f"weights {gib(self.weights_bytes)}"
        if self.host_weights_bytes:
            weights += f", layers on the host {gib(self.host_weights_bytes)}"
            buffers -= self.host_weights_bytes if self.host_is_device else 0
        if self.lora_bytes:
            weights += f", LoRA adapters {gib(self.lora_bytes)}"
        text = (
            f"needs {gib(self.total_bytes)} ({weights}, KV pool "
            f"{gib(self.kv_bytes)}, transfer buffers {gib(buffers)}, page tables and sampling "
            f"state {gib(self.state_bytes)}, program scratch {gib(self.scratch_bytes)})"
        )
        if self.total_bytes > self.limit_bytes:
            return f"{text}, but {gib(self.limit_bytes)} may be used"
        return f"{text}, but a KV pool may take {gib(self.pool_limit_bytes)} by default"

    def check(self) -> None:
        """Raises MemoryPlanError, with the largest pool that fits, unless everything fits."""
        if self.fits:
            return
        pages = self.room_bytes // self.page_bytes
        way = "a smaller max_num_batched_tokens, max_num_seqs or host_kv_bytes is needed"
        if pages >= 2:
            way = f"kv_cache_memory_bytes of at most {pages * self.page_bytes} would fit"
        raise MemoryPlanError(f"The engine {self.needs()}; {way}.")


def host_kv(
    layout: KVLayout, num_pages: int, host_pages: int, resident_tokens: int | None = None
) -> HostKV:
    """What sequences longer than a pool of `num_pages` may take: a third of the pool each, beside
    their windows, so that others run beside one, but at least the pages of a step's tokens. With
    `resident_tokens`, what sequences may take that are longer than that."""
    capacity = num_pages - 1
    if resident_tokens is not None:
        resident = max(layout.chunk_pages, cdiv(resident_tokens, layout.page_size))
        within = layout.pages_for(resident * layout.page_size)
        return HostKV(min(capacity, within), resident, host_pages, layout)
    third = (capacity - layout.window_pages) // (3 * layout.num_full)
    return HostKV(capacity, max(layout.chunk_pages, third), host_pages, layout)


def group_pages(host_kv: HostKV) -> int:
    """Host pages that are copied and attended to together."""
    return min(KV_GROUP_PAGES, host_kv.resident_pages)


def plan_memory(
    config: EngineConfig,
    model: ModelConfig,
    layout: KVLayout,
    weights_bytes: int,
    state_bytes: int,
    whole_page_bytes: int,
    device: jax.Device | DescribedDevice,
    lora_bytes: int = 0,
    host_weights_bytes: int = 0,
    disk_weights_bytes: int = 0,
    shadow: ShadowSizes | None = None,
    has_kv_window: bool = True,
) -> MemoryPlan:
    """Decide the KV pool of a resolved config, before programs are compiled. `layout` has the KV
    groups of a pipeline stage, which are those of all stages; a whole page has `whole_page_bytes`.

    Unless `kv_cache_memory_bytes` is set, the pool has at least the pages of one request of
    max_model_len; the caller checks whether they fit. Raises MemoryPlanError for pool settings
    that contradict each other or exceed the host's memory.
    """
    itemsize = jnp.dtype(config.dtype).itemsize
    num_devices = config.num_devices
    page_bytes = whole_page_bytes // num_devices
    on_host = config.kv_on == "host"
    pages_of_longest = layout.pages_for(config.max_model_len)
    pages_of_one = pages_of_longest
    if on_host:
        resident = layout.num_full * layout.chunk_pages + layout.window_pages
        pages_of_one = min(pages_of_longest, resident)
    limit = usable_memory(device, config.memory_utilization)
    on_cpu = device.platform == "cpu"
    if on_cpu:  # All devices of a host share its memory.
        limit //= max(num_devices // jax.process_count(), 1)
    scratch = _scratch_guess(config, model, itemsize)
    host_pages = _lower_pages("host_kv_bytes", config.host_kv_bytes or 0, whole_page_bytes)
    if config.host_kv_bytes is None and (on_host or not on_cpu):
        # Its buffers are taken before the pool.
        host_pages = host_share(device) // whole_page_bytes
    plan = MemoryPlan(
        limit_bytes=limit,
        weights_bytes=weights_bytes,
        state_bytes=state_bytes,
        scratch_bytes=scratch,
        page_bytes=page_bytes,
        num_pages=0,
        layout=layout,
        host_pages=host_pages,
        disk_pages=_lower_pages("disk_kv_bytes", config.disk_kv_bytes, whole_page_bytes),
        host_is_device=on_cpu,
        num_devices=num_devices,
        lora_bytes=lora_bytes,
        host_weights_bytes=host_weights_bytes,
        disk_weights_bytes=disk_weights_bytes,
        kv_on_host=on_host,
        resident_kv_tokens=config.resident_kv_tokens,
        shadow=shadow,
        has_kv_window=has_kv_window,
    )
    if on_host and config.host_kv_bytes is None:
        most = pages_of_longest * (config.max_num_seqs if config.resident_kv_tokens else 1)
        plan = dataclasses.replace(plan, host_pages=min(host_pages, most))
    if host_weights_bytes * num_devices > free_on_host(device):
        raise MemoryPlanError(
            f"weights_on is 'host', and the layers take {host_weights_bytes * num_devices} bytes, "
            f"but {free_on_host(device)} bytes of the host's memory are free; set weights_on to "
            "'disk', or resident_weight_bytes to keep more of them on the device."
        )
    if config.kv_cache_memory_bytes is not None:
        num_pages = config.kv_cache_memory_bytes // page_bytes
        if num_pages < 2:
            raise MemoryPlanError(
                f"kv_cache_memory_bytes {config.kv_cache_memory_bytes} holds {num_pages} pages of "
                f"{page_bytes} bytes; at least 2 are needed ({2 * page_bytes} bytes), and "
                f"{(pages_of_longest + 1) * page_bytes} bytes for one request of max_model_len "
                f"{config.max_model_len} tokens."
            )
    else:
        if on_cpu:
            plan = dataclasses.replace(plan, pool_limit_bytes=_CPU_KV_BYTES // num_devices)
        of_each = pages_of_longest
        if plan.host_kv is not None and config.resident_kv_tokens is not None:
            of_each = plan.host_kv.in_pool(config.max_model_len)
        most = config.max_num_seqs * of_each
        if config.max_num_seqs > 1:  # One alone is admitted to any pool that holds it.
            most = capacity_beside_watermark(most)
        num_pages = min(most + 1, max(plan.room_bytes // page_bytes, pages_of_one + 1))
    plan = dataclasses.replace(plan, num_pages=num_pages)
    if on_host:
        plan = _with_host_kv(plan, config)
    elif config.host_kv_bytes is None:
        plan = dataclasses.replace(plan, host_pages=min(host_pages, num_pages))
    if config.preemption == "swap" and not plan.host_pages and not plan.disk_pages:
        raise MemoryPlanError(
            "preemption is 'swap', but there is no tier to swap to; set host_kv_bytes, or "
            "disk_kv_bytes and disk_kv_dir."
        )
    if plan.host_bytes > free_on_host(device):
        raise MemoryPlanError(
            f"host_kv_bytes is {config.host_kv_bytes}, but {free_on_host(device)} bytes of the "
            "host's memory are free; set it to less than that."
        )
    return plan


def _with_host_kv(plan: MemoryPlan, config: EngineConfig) -> MemoryPlan:
    """The plan with no more host pages than one sequence needs, or with `resident_kv_tokens` all of
    them, unless there is a budget. Raises MemoryPlanError for a pool that cannot hold a step's
    tokens of one sequence."""
    host, capacity, windows = plan.host_kv, plan.num_pages - 1, ""
    least = host.in_pool(config.max_model_len)
    if capacity < least:
        if plan.layout.windowed:
            windows = ", with those of its windows"
        raise MemoryPlanError(
            f"kv_on is 'host', and the pool has {capacity} pages, but a step's "
            f"{plan.layout.max_chunk} tokens of one sequence may lie on {least}{windows}; set "
            f"kv_cache_memory_bytes to at least {(least + 1) * plan.page_bytes}, or "
            "max_num_batched_tokens to less."
        )
    if config.host_kv_bytes is None:
        needed = host.on_host(config.max_model_len)
        needed *= 1 if config.resident_kv_tokens is None else config.max_num_seqs
        plan = dataclasses.replace(plan, host_pages=min(plan.host_pages, needed))
    return plan


def _lower_pages(setting: str, num_bytes: int, page_bytes: int) -> int:
    """Pages of a lower tier. Raises MemoryPlanError for a budget of less than one page."""
    if 0 < num_bytes < page_bytes:
        raise MemoryPlanError(
            f"{setting} is {num_bytes}, less than one page of {page_bytes} bytes; set it to at "
            "least that, or to 0 for no such tier."
        )
    return num_bytes // page_bytes


def _scratch_guess(config: EngineConfig, model: ModelConfig, itemsize: int) -> int:
    """Temporaries of the largest step: activations of a few layers' width, logits of all rows."""
    widest = 4 * model.hidden_size + 3 * model.intermediate_size
    if model.moe is not None:  # Float32 sums, and routing.
        widest += 2 * model.hidden_size + 4 * model.moe.num_experts
    if (mla := model.mla) is not None:  # Queries and results as wide as latents, and as heads.
        heads = model.num_heads // config.tensor_parallel_size
        of_head = mla.nope_dim + mla.rope_dim + mla.value_dim
        widest += 2 * heads * (model.head_dim + model.value_dim + of_head)
    activations = config.max_num_batched_tokens * widest * max(itemsize, 4)
    rows = config.max_num_seqs * (1 + config.num_speculative_tokens)
    return activations + 4 * rows * model.vocab_size * 4


def gib(size: int) -> str:
    """A size in GiB, as messages have it."""
    return f"{size / GIB:.2f} GiB"
