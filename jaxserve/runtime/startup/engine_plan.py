"""What an engine will be, decided before a weight is read: sizes, memory, programs."""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.engine_info import EngineInfo
from jaxserve.core.errors import ConfigError, MemoryPlanError
from jaxserve.core.model_config import ModelConfig
from jaxserve.core.settings.config import EngineConfig
from jaxserve.kv.layout import KVLayout
from jaxserve.kv.offload.stores import DiskStore
from jaxserve.models.loading.checkpoint import Checkpoint, open_checkpoint
from jaxserve.models.loading.drafters.medusa import MedusaCheckpoint
from jaxserve.models.registry import is_registered
from jaxserve.runtime.hardware.cpu_threads import make_room_for_collectives
from jaxserve.runtime.hardware.device_memory import reserve_memory
from jaxserve.runtime.hardware.devices import (
    DescribedDevice,
    described_mesh,
    engine_devices,
    engine_mesh,
)
from jaxserve.runtime.hardware.host_cpu import host_device
from jaxserve.runtime.hardware.hosts import Hosts
from jaxserve.runtime.planning.alternatives import Changes, refusal
from jaxserve.runtime.planning.memory import MemoryPlan, gib, plan_memory
from jaxserve.runtime.planning.shadow import CHUNK
from jaxserve.runtime.programs.compilation.executable_cache import ExecutableCache
from jaxserve.runtime.programs.compilation.executables import Programs
from jaxserve.runtime.programs.forward.forward_programs import block_bytes
from jaxserve.runtime.programs.forward.step_work import prefix_cost
from jaxserve.runtime.programs.shapes.params import partitioned, partitioned_adapters
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from jaxserve.runtime.startup.attention_backend import check_attention_backend
from jaxserve.runtime.startup.drafters import drafting, drafting_layers, open_drafter
from jaxserve.runtime.startup.loading import layer_file
from jaxserve.runtime.weights.stores import check_room
from jaxserve.scheduler.admission import AdmissionRule
from jaxserve.scheduler.config import SchedulerConfig


@dataclasses.dataclass(frozen=True)
class EnginePlan:
    """Everything decided before a weight is read: sizes, memory, programs."""

    config: EngineConfig
    checkpoint: Checkpoint
    shapes: ProgramShapes
    memory: MemoryPlan
    device: jax.Device | DescribedDevice
    draft_checkpoint: Checkpoint | MedusaCheckpoint | None = None
    """The model, the layer or the heads that draft, with speculation by one of them."""

    def __str__(self) -> str:
        """One line, for a log."""
        config, memory, host = self.config, self.memory, self.shapes.host_kv
        streamed = f" (layers on {config.weights_on})" if self.shapes.placement.streamed else ""
        reads = f"; to attend to pages on the host, steps {host}" if host else ""
        return (
            f"{self.checkpoint.path.name} ({self.shapes.model.architecture}, {config.dtype}) on "
            f"{memory.num_devices} x {self.device.device_kind}: weights "
            f"{gib(memory.weights_bytes)}{streamed}, KV pool {gib(memory.kv_bytes)} for "
            f"{memory.kv_tokens:,} tokens, up to {config.max_num_seqs} sequences, "
            f"{self.admission.num_at_once(config.max_model_len)} of {config.max_model_len:,} tokens"
            f"{reads}"
        )

    @property
    def weights_dequantized(self) -> tuple[int, int]:
        """Of the weights that the checkpoint's `quantization_config` has quantized, the number that
        become values of `dtype`, and the number of all."""
        if self.checkpoint.quantization is None:
            return 0, 0
        stored = {
            part.tensor
            for spec in jax.tree.leaves(self.shapes.family.param_specs(self.checkpoint.config))
            for part in spec.parts
            if spec.num_inputs and self.checkpoint.is_quantized(part.tensor)
        }
        packed = {
            part.tensor
            for spec in jax.tree.leaves(self.shapes.specs)
            for part in spec.parts
            if spec.format is not None
        }
        return len(stored - packed), len(stored)

    @property
    def cache(self) -> ExecutableCache | None:
        """Cache of this plan's executables; None when disabled, or for a registered model family:
        the cache notices changes of jaxserve's own sources only."""
        draft = self.shapes.draft_model
        models = [self.shapes.model, *([draft.model] if draft else [])]
        if not self.config.compilation_cache or any(
            is_registered(model.architecture) for model in models
        ):
            return None
        return ExecutableCache(self.shapes.describe(), self.shapes.devices)

    @property
    def digests(self) -> dict[str, str]:
        """What must be equal on all hosts of the weights, by its name in an error."""
        digests = {"the digest of the weights": self.checkpoint.fingerprint}
        if self.draft_checkpoint is not None:
            digests["the digest of the draft model's weights"] = self.draft_checkpoint.fingerprint
        return digests

    @property
    def drafting_layers(self) -> ModelConfig | None:
        """The config of the layers that draft and have KV of their own; None without such."""
        return drafting_layers(self.checkpoint, self.draft_checkpoint)

    @functools.cached_property
    def info(self) -> EngineInfo:
        """What others need to know of this engine. To tell the weights apart, samples of their
        files are read."""
        return EngineInfo(
            self.config,
            self.shapes.model,
            self.checkpoint.fingerprint,
            self.device.device_kind,
            tuple(self.shapes.processors.names),
            self.memory.num_pages - 1,
        )

    @property
    def scheduler(self) -> SchedulerConfig:
        """The limits of the engine's scheduler."""
        return SchedulerConfig.of(self.config, self.shapes.buckets, prefix_cost(self.shapes))

    @property
    def admission(self) -> AdmissionRule:
        """The scheduler's admission rule for the planned pool."""
        memory = self.memory
        return AdmissionRule.of(self.scheduler, memory.num_pages - 1, memory.layout, memory.host_kv)

    def with_programs(self, programs: Programs) -> EnginePlan:
        """The plan with the scratch memory that the compiled programs report.

        Raises MemoryPlanError when the plan no longer fits.
        """
        memory = dataclasses.replace(self.memory, scratch_bytes=programs.temp_bytes)
        memory.check()
        return dataclasses.replace(self, memory=memory)


def plan_engine(config: EngineConfig, hosts: Hosts | None = None) -> EnginePlan:
    """Plan an engine of `config`. Reads the model's header, no weights.

    Of several `hosts` the one with the least memory determines the pool. Raises ModelError,
    ConfigError, or, when it does not fit, MemoryPlanError with alternatives that do.
    """
    return accept(decide(config), hosts)


def decide(config: EngineConfig) -> EnginePlan:
    """A plan that may exceed the available memory (`memory.fits`), e.g. to print its memory use.

    Raises ModelError, ConfigError, or MemoryPlanError for contradictory pool settings.
    """
    make_room_for_collectives()
    reserve_memory(config.memory_utilization)
    devices = engine_devices(config)
    device = next(device for device in devices if device.process_index == jax.process_index())
    checkpoint = open_checkpoint(config.model, config.load_format, seed=config.seed)
    config = config.resolve(checkpoint.config, device.platform)
    config = _of_hosts(config, device)
    draft = open_drafter(config, checkpoint, config.load_format)
    return decide_on(device, engine_mesh(config, devices), config, checkpoint, draft)


def plan_described(
    config: EngineConfig, device: DescribedDevice, *, propose: bool = True
) -> EnginePlan:
    """The plan of an engine on devices like `device`, of which there need not be any here. Reads
    the model's config only; scratch memory stays an estimate.

    Raises as `plan_engine` does; the alternatives take as long as dozens of plans, and are left out
    unless `propose`.
    """
    _check_described(config, device)
    kept = config.quantization
    in_file = kept == "gguf" or (kept == "mxfp4" and str(config.model).endswith(".gguf"))
    load_format = "auto" if in_file else "dummy"  # Which tensors are in blocks, the file says.
    checkpoint = open_checkpoint(config.model, load_format)
    config = config.resolve(checkpoint.config, device.platform)
    config = _of_hosts(config, device)
    draft = open_drafter(config, checkpoint, load_format)
    decided = decide_on(device, described_mesh(config), config, checkpoint, draft)
    if not decided.memory.fits and propose:
        raise _refusal(decided)
    decided.memory.check()
    return decided


def decide_on(
    device: jax.Device | DescribedDevice,
    mesh: Mesh | AbstractMesh | None,
    config: EngineConfig,
    checkpoint: Checkpoint,
    draft_checkpoint: Checkpoint | MedusaCheckpoint | None = None,
) -> EnginePlan:
    """Like `decide`, for a resolved config on a mesh of devices like `device`, or on `device`."""
    if config.quantization is None:
        config = dataclasses.replace(config, quantization=checkpoint.quantization)
    if config.kv_cache_dtype != "auto":
        _check_quantizes(config, checkpoint.config)
        if draft_checkpoint is not None and not isinstance(draft_checkpoint, MedusaCheckpoint):
            _check_quantizes(config, draft_checkpoint.config)
    if config.weights_on != "device" and checkpoint.format == "orbax":
        raise ConfigError(
            f"weights_on is {config.weights_on!r}, but {checkpoint.path} is an Orbax checkpoint, "
            "which is read whole; give the model as safetensors or GGUF."
        )
    if config.enable_expert_parallel and checkpoint.config.moe is None:
        raise ConfigError(
            f"enable_expert_parallel is True, but {checkpoint.config.architecture} has no experts; "
            "leave it out."
        )
    model, family, specs = partitioned(config, checkpoint, mesh, config.quantization)
    draft, medusa = drafting(config, checkpoint, draft_checkpoint, mesh)
    shapes = ProgramShapes(
        config,
        model,
        family,
        specs,
        num_pages=0,
        device=device,
        mesh=mesh,
        draft_model=draft,
        medusa=medusa,
        lora=partitioned_adapters(config, checkpoint.config, mesh) if config.enable_lora else None,
    )
    check_host_kv(config, checkpoint.config, shapes.kv_layout)
    memory = plan_memory(
        config,
        model,
        shapes.kv_layout,
        shapes.weights_bytes,
        shapes.state_bytes + block_bytes(shapes),
        shapes.kv.whole_page_bytes,
        device,
        shapes.lora_bytes,
        shapes.placement.host_bytes,
        shapes.placement.disk_bytes,
        shapes.shadow,
        shapes.host_kv is not None and shapes.host_kv.has_window,
    )
    shapes = _with_pool(shapes, memory)
    return EnginePlan(config, checkpoint, shapes, memory, device, draft_checkpoint)


def _check_quantizes(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError for a model whose KV is never quantized."""
    if model.mla:
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype!r}, but {model.architecture} keeps latents, "
            "which are not quantized; leave kv_cache_dtype out."
        )
    if config.kv_cache_dtype == "int4" and config.attention_backend == "pallas":
        raise ConfigError(
            "attention_backend is 'pallas', but no kernel reads the pages of "
            "kv_cache_dtype='int4'; leave attention_backend out, or use int8."
        )
    if config.kv_cache_dtype == "int4" and model.head_dim % 2:
        raise ConfigError(
            f"kv_cache_dtype is 'int4', which packs two features in a byte, but head_dim is "
            f"{model.head_dim}; use int8."
        )


def check_host_kv(config: EngineConfig, model: ModelConfig, layout: KVLayout) -> None:
    """Raises ConfigError for KV on the host that a model, with these KV groups, has no use for, or
    that it cannot have together with other settings."""
    windowed = any(spec.window and spec.window < config.max_model_len for spec in model.kv_specs)
    if config.kv_compression != "none" and (model.mla or windowed):
        which = "keeps latents" if model.mla else "has layers with a sliding window"
        raise ConfigError(
            f"kv_compression is {config.kv_compression!r}, but {model.architecture} {which}, and "
            "it is for keys and values of the whole context; leave kv_compression out."
        )
    if config.kv_on == "host" and not layout.num_full:
        raise ConfigError(
            f"kv_on is 'host', but all layers of {model.architecture} have a sliding window, whose "
            f"KV before it is given back: no sequence holds more than {layout.window_pages} pages. "
            "Leave kv_on out."
        )
    if config.steps_per_weight_read > 1 and config.kv_on == "host" and layout.windowed:
        raise ConfigError(
            f"steps_per_weight_read is {config.steps_per_weight_read} and kv_on 'host', but "
            f"{model.architecture} has layers with a sliding window, whose pages are freed before "
            "all steps of a block have run; set steps_per_weight_read to 1, or leave kv_on out."
        )
    for name, value in (("host_attention", "enabled"), ("kv_compression", "sparf")):
        if getattr(config, name) == value and host_device() is None:
            raise ConfigError(
                f"{name} is {value!r}, but JAX has no CPU device here; add cpu to JAX_PLATFORMS, "
                f"or leave {name} out."
            )
    if config.kv_compression == "shadow" and config.page_size % CHUNK:
        raise ConfigError(
            f"kv_compression is 'shadow', which recalls chunks of {CHUNK} tokens, but page_size is "
            f"{config.page_size}; set it to a multiple of {CHUNK}."
        )


def accept(decided: EnginePlan, hosts: Hosts | None = None) -> EnginePlan:
    """The plan, agreed on with all `hosts`, if it is feasible.

    Raises MemoryPlanError when it does not fit, ConfigError when its disk tier or its attention
    backend cannot be used.
    """
    config, memory = decided.config, decided.memory
    if not memory.fits:
        raise _refusal(decided)
    if hosts is not None:
        memory = dataclasses.replace(memory, num_pages=hosts.minimum("pages", memory.num_pages))
    if memory.disk_pages:  # Fail now, not after loading.
        DiskStore(config.disk_kv_dir, memory.disk_pages, memory.whole_page_bytes).close()
    if memory.disk_weights_bytes:
        layer_file(decided.checkpoint, decided.shapes).check_room()
    shapes = _with_pool(decided.shapes, memory)
    check_attention_backend(shapes)
    _ = shapes.processors  # Fail now, not while programs compile.
    return dataclasses.replace(decided, shapes=shapes, memory=memory)


def _with_pool(shapes: ProgramShapes, memory: MemoryPlan) -> ProgramShapes:
    tiers = bool(memory.host_pages or memory.disk_pages) and not memory.kv_on_host
    return dataclasses.replace(
        shapes,
        num_pages=memory.num_pages,
        num_host_pages=memory.host_pages if memory.kv_on_host else 0,
        transfers_pages=tiers or shapes.config.debug_kv,
        across_hosts=shapes.mesh is not None and jax.process_count() > 1,
    )


def _refusal(decided: EnginePlan) -> MemoryPlanError:
    """The error for a plan that does not fit, with alternatives that do."""
    config, device, checkpoint = decided.config, decided.device, decided.checkpoint

    def plan_of(changes: Changes) -> MemoryPlan | None:
        """The plan on as many devices like this one as it needs, whether they exist or not."""
        try:
            changed = _of_hosts(dataclasses.replace(config, **changes), device)
            mesh = described_mesh(changed)
            other = decide_on(device, mesh, changed, checkpoint, decided.draft_checkpoint)
            check_attention_backend(other.shapes)
            if config.weights_on == "device" and not isinstance(device, DescribedDevice):
                check_room(other.memory.disk_weights_bytes * other.memory.num_devices)
        except (ConfigError, MemoryPlanError):
            return None
        return other.memory

    num_devices = len(jax.devices()) if jax.process_count() == 1 else 0
    needs = f"{checkpoint.path.name} {decided.memory.needs()}."
    return refusal(needs, config, plan_of, num_devices)


def _check_described(config: EngineConfig, device: DescribedDevice) -> None:
    """Raises ConfigError for attention whose time on a target device, or its host, is unknown."""
    sends_queries = config.host_attention == "enabled" and device.platform != "cpu"
    is_compressed = config.kv_compression != "none"
    for name, refused, unknown in (
        ("host_attention", sends_queries, "how fast the hosts of target devices attend is unknown"),
        ("kv_compression", is_compressed, "what its decodes read is not modelled"),
    ):
        if refused:
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}, and {unknown}; leave it out, or plan on the "
                "devices themselves."
            )


def _of_hosts(config: EngineConfig, device: jax.Device | DescribedDevice) -> EngineConfig:
    """The resolved config of an engine on devices like this one, those of each host with a process.

    Raises ConfigError for what is for one process.
    """
    num_hosts = jax.process_count()
    if isinstance(device, DescribedDevice):
        num_hosts = cdiv(config.num_devices, device.devices_per_host)
    if num_hosts == 1:
        return config
    alone = {"enable_lora": config.enable_lora, "weights_on": config.weights_on != "device"}
    alone["kv_on"] = config.kv_on != "device"
    for name in [name for name, used in alone.items() if used]:
        raise ConfigError(
            f"{name} is for a single process, and this engine has one on each of {num_hosts} "
            f"hosts; give it devices of one host, or leave {name} out."
        )
    if config.host_kv_bytes or config.disk_kv_bytes:
        raise ConfigError(
            f"host_kv_bytes is {config.host_kv_bytes} and disk_kv_bytes {config.disk_kv_bytes}, "
            f"but {num_hosts} hosts cannot offload KV pages, whose transfers finish at different "
            "times on each; leave both out."
        )
    return dataclasses.replace(config, host_kv_bytes=0)
