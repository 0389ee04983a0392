"""Engine startup: open the checkpoint, plan, then compile programs while loading weights."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, Protocol

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError, MemoryPlanError
from jaxserve.core.events import EventLog
from jaxserve.core.version import __version__
from jaxserve.kv.tiers import DiskStore
from jaxserve.models.loading.checkpoint import Checkpoint, open_checkpoint
from jaxserve.models.loading.params import load_params
from jaxserve.models.partition import partition
from jaxserve.models.quantization import with_formats
from jaxserve.models.registry import get_family, is_registered
from jaxserve.runtime.alternatives import (
    Changes,
    alternatives,
    devices_needed,
    gib,
    in_words,
    weights_of,
)
from jaxserve.runtime.cpu_threads import make_room_for_collectives
from jaxserve.runtime.devices import described_mesh, engine_devices, engine_mesh
from jaxserve.runtime.hosts import Hosts
from jaxserve.runtime.memory import MemoryPlan, plan_memory
from jaxserve.runtime.programs.executable_cache import ExecutableCache
from jaxserve.runtime.programs.executables import Compilation, Program, Programs
from jaxserve.runtime.programs.kinds import ProgramKinds, check_attention
from jaxserve.runtime.programs.program_shapes import ProgramShapes
from jaxserve.runtime.runner import Runner
from jaxserve.scheduler.admission import AdmissionRule
from jaxserve.scheduler.config import SchedulerConfig
from jaxserve.text import Tokenizer


class Progress(Protocol):
    """Callback for startup progress, called from any thread: part name, amount done, total."""

    def __call__(self, part: str, done: int, total: int) -> None: ...


def no_progress(part: str, done: int, total: int) -> None:
    """Ignores progress."""


@dataclasses.dataclass(frozen=True)
class EnginePlan:
    """Everything decided before a weight is read: sizes, memory, programs."""

    config: EngineConfig
    checkpoint: Checkpoint
    shapes: ProgramShapes
    memory: MemoryPlan
    device: jax.Device

    def __str__(self) -> str:
        """One line, for a log."""
        config, memory = self.config, self.memory
        return (
            f"{self.checkpoint.path.name} ({self.shapes.model.architecture}, {config.dtype}) on "
            f"{memory.num_devices} x {self.device.device_kind}: weights "
            f"{gib(memory.weights_bytes)}, KV pool {gib(memory.kv_bytes)} for "
            f"{memory.kv_tokens:,} tokens, up to {config.max_num_seqs} sequences of "
            f"{config.max_model_len:,} tokens"
        )

    @property
    def cache(self) -> ExecutableCache | None:
        """Cache of this plan's executables; None when disabled, or for a registered model family:
        the cache notices changes of jaxserve's own sources only."""
        if not self.config.compilation_cache or is_registered(self.shapes.model.architecture):
            return None
        return ExecutableCache(self.shapes.describe(), self.shapes.devices)

    @property
    def scheduler(self) -> SchedulerConfig:
        """The limits of the engine's scheduler."""
        return SchedulerConfig.of(self.config, self.shapes.buckets)

    @property
    def admission(self) -> AdmissionRule:
        """The scheduler's admission rule for the planned pool."""
        return AdmissionRule.of(self.scheduler, self.memory.num_pages - 1, self.memory.layout)

    def compile(self, progress: Progress = no_progress, log: EventLog | None = None) -> Compilation:
        """Start to load or compile every program."""
        all_specs = ProgramKinds(self.shapes).specs()
        done: list[str] = []

        def on_done(program: Program) -> None:
            done.append(program.name)
            progress("programs", len(done), len(all_specs))

        def timed(name: str) -> contextlib.AbstractContextManager[None]:
            return log.phase("compile", name) if log else contextlib.nullcontext()

        return Compilation(all_specs, self.cache, on_done, timed)

    def with_programs(self, programs: Programs) -> EnginePlan:
        """The plan with the scratch memory that the compiled programs report.

        Raises MemoryPlanError when the plan no longer fits.
        """
        memory = dataclasses.replace(self.memory, scratch_bytes=programs.temp_bytes)
        memory.check()
        return dataclasses.replace(self, memory=memory)


def plan(config: EngineConfig, hosts: Hosts | None = None) -> EnginePlan:
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
    devices = engine_devices(config)
    device = next(device for device in devices if device.process_index == jax.process_index())
    checkpoint = open_checkpoint(config.model, config.load_format, seed=config.seed)
    config = config.resolve(checkpoint.config, device.platform)
    if jax.process_count() > 1:
        config = _without_lower_tiers(config)
    return decide_on(device, engine_mesh(config, devices), config, checkpoint)


def decide_on(
    device: jax.Device,
    mesh: Mesh | AbstractMesh | None,
    config: EngineConfig,
    checkpoint: Checkpoint,
) -> EnginePlan:
    """Like `decide`, for a resolved config on a mesh of devices like `device`, or on `device`."""
    # Context-dependent rotary frequencies are computed for the served context length.
    model = dataclasses.replace(checkpoint.config, max_position_embeddings=config.max_model_len)
    family = get_family(model.architecture)
    if config.quantization is not None and config.num_devices > 1:
        raise ConfigError(
            f"quantization is {config.quantization!r}, but quantized weights run on one device "
            f"only, and the config asks for {config.num_devices}; leave quantization out."
        )
    specs = with_formats(family.param_specs(model), config.quantization, checkpoint.quantized_kind)
    if mesh is not None:
        model, specs = partition(
            model,
            specs,
            tensor=config.tensor_parallel_size,
            stages=config.pipeline_parallel_size,
            vocab=config.tensor_parallel_size * config.pipeline_parallel_size,
        )
    shapes = ProgramShapes(config, model, family, specs, num_pages=0, device=device, mesh=mesh)
    memory = plan_memory(
        config, model, shapes.kv_layout, shapes.weights_bytes, shapes.state_bytes, device
    )
    return EnginePlan(config, checkpoint, _with_pool(shapes, memory), memory, device)


def accept(decided: EnginePlan, hosts: Hosts | None = None) -> EnginePlan:
    """The plan, agreed on with all `hosts`, if it is feasible.

    Raises MemoryPlanError when it does not fit, ConfigError when its disk tier or its attention
    backend cannot be used.
    """
    config, memory = decided.config, decided.memory
    if not memory.fits:
        raise _refusal(decided)
    if hosts is not None:
        memory = dataclasses.replace(memory, num_pages=hosts.least("pages", memory.num_pages))
    if memory.disk_pages:  # Fail now, not after loading.
        DiskStore(config.disk_kv_dir, memory.disk_pages, memory.image_bytes).close()
    shapes = _with_pool(decided.shapes, memory)
    _check_backend(shapes)
    _ = shapes.processors  # Fail now, not while programs compile.
    return dataclasses.replace(decided, shapes=shapes, memory=memory)


def _with_pool(shapes: ProgramShapes, memory: MemoryPlan) -> ProgramShapes:
    moves_pages = bool(memory.host_pages or memory.disk_pages or shapes.config.debug_kv)
    return dataclasses.replace(shapes, num_pages=memory.num_pages, moves_pages=moves_pages)


def _check_backend(shapes: ProgramShapes) -> None:
    """Raises ConfigError for an explicit backend without support; "auto" only warns."""
    if shapes.config.attention_backend == "pallas":
        check_attention(shapes)


def _refusal(decided: EnginePlan) -> MemoryPlanError:
    """The error for a plan that does not fit, with alternatives that do."""
    config, device, checkpoint = decided.config, decided.device, decided.checkpoint

    def plan_of(changes: Changes) -> MemoryPlan | None:
        """The plan on as many devices like this one as it needs, whether they exist or not."""
        try:
            changed = dataclasses.replace(config, **changes)
            other = decide_on(device, described_mesh(changed), changed, checkpoint)
            _check_backend(other.shapes)
        except (ConfigError, MemoryPlanError):
            return None
        return other.memory

    one_process = jax.process_count() == 1
    found = alternatives(config, plan_of, len(jax.devices()) if one_process else 0)
    text = f"{checkpoint.path.name} {decided.memory.needs()}."
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
    if size is not None and one_process:
        more = dataclasses.replace(config, tensor_parallel_size=size, devices=None)
        if more.num_devices > len(jax.devices()):
            text += f" tensor_parallel_size {size} would fit {more.num_devices} such devices."
    return MemoryPlanError(text, found)


_VERSIONS = {
    "the version of jaxserve": __version__,
    "the version of JAX": jax.__version__,
}


def _common(config: EngineConfig) -> dict[str, Any]:
    """Settings that must be equal on all hosts. Paths may differ."""
    settings = dataclasses.asdict(config)
    settings["logits_processors"] = [
        each if isinstance(each, str) else getattr(each, "__name__", "")
        for each in config.logits_processors
    ]
    return {name: settings[name] for name in settings if name not in ("model", "disk_kv_dir")}


def _without_lower_tiers(config: EngineConfig) -> EngineConfig:
    """The config without lower tiers, whose transfers finish at different times on each host.

    Raises ConfigError when lower tiers are configured.
    """
    if config.host_kv_bytes or config.disk_kv_bytes:
        raise ConfigError(
            f"host_kv_bytes is {config.host_kv_bytes} and disk_kv_bytes {config.disk_kv_bytes}, "
            f"but {jax.process_count()} hosts cannot offload KV pages; leave both out."
        )
    return dataclasses.replace(config, host_kv_bytes=0)


def start(
    config: EngineConfig,
    log: EventLog,
    progress: Progress = no_progress,
    hosts: Hosts | None = None,
) -> tuple[EnginePlan, Tokenizer, Runner]:
    """Make a model ready to run: programs compile in threads while weights load.

    Raises DistributedError when `hosts` differ in versions, settings or weights.
    """
    with log.phase("startup", "plan"):
        if hosts is not None:
            hosts.compare("asked", _VERSIONS | _common(config))
        decided = plan(config, hosts)
        if hosts is not None:
            weights = {"the digest of the weights": decided.checkpoint.fingerprint}
            hosts.compare("decided", weights | _common(decided.config))
        tokenizer = decided.checkpoint.tokenizer()
    compilation = decided.compile(progress, log)
    try:
        with log.phase("startup", "weights"):
            params = load_params(
                decided.checkpoint,
                decided.shapes.specs,
                dtype=decided.config.dtype,
                shardings=decided.shapes.param_shardings,
                progress=functools.partial(progress, "weights"),
            )
    except BaseException:
        compilation.cancel()
        raise
    with log.phase("startup", "programs"):
        programs = compilation.result()
    decided = decided.with_programs(programs)
    with log.phase("startup", "memory"):
        runner = Runner(decided.shapes, params, programs)
    if hosts is not None:
        hosts.all_ready()
    return decided, tokenizer, runner
