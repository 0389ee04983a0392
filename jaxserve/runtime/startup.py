"""From a config to a model that is ready: open, plan, then compile and load side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp

from jaxserve.config import EngineConfig
from jaxserve.engine.events import EventLog
from jaxserve.kv.tiers import DiskStore
from jaxserve.models.loading.checkpoint import Checkpoint, open_checkpoint
from jaxserve.models.loading.params import load_params, params_bytes
from jaxserve.models.packing import with_formats
from jaxserve.models.registry import get_family
from jaxserve.runtime.executable_cache import ExecutableCache
from jaxserve.runtime.memory import MemoryPlan, plan_memory
from jaxserve.runtime.programs import Compilation, Program, Programs
from jaxserve.runtime.runner import Runner
from jaxserve.runtime.specs import Geometry, check_attention, program_specs
from jaxserve.sampling import state_bytes
from jaxserve.text import Tokenizer


class Progress(Protocol):
    """Told how startup goes, from any thread: a part's name, how much is done, of how much."""

    def __call__(self, part: str, done: int, total: int) -> None: ...


def no_progress(part: str, done: int, total: int) -> None:
    """Progress for nobody."""


@dataclasses.dataclass(frozen=True)
class EnginePlan:
    """Everything decided before a weight is read: sizes, memory, programs."""

    config: EngineConfig
    checkpoint: Checkpoint
    geometry: Geometry
    memory: MemoryPlan
    device: jax.Device

    @property
    def cache(self) -> ExecutableCache | None:
        """Where this plan's executables are kept; None when the config says not to."""
        if not self.config.compilation_cache:
            return None
        return ExecutableCache(self.geometry.describe())

    def compile(self, progress: Progress = no_progress, log: EventLog | None = None) -> Compilation:
        """Begin to load or compile every program."""
        all_specs = program_specs(self.geometry)
        done: list[str] = []

        def on_done(program: Program) -> None:
            done.append(program.name)
            progress("programs", len(done), len(all_specs))

        def timed(name: str) -> contextlib.AbstractContextManager[None]:
            return log.phase("compile", name) if log else contextlib.nullcontext()

        return Compilation(all_specs, self.cache, on_done, timed)

    def with_programs(self, programs: Programs) -> EnginePlan:
        """The plan with scratch memory as the compiled programs state it.

        Raises MemoryPlanError when that no longer fits.
        """
        memory = dataclasses.replace(self.memory, scratch_bytes=programs.temp_bytes)
        memory.check()
        return dataclasses.replace(self, memory=memory)


def plan(config: EngineConfig) -> EnginePlan:
    """Decide what an engine of `config` will be. Reads the model's header, no weights.

    Raises ModelError, ConfigError, or MemoryPlanError when it cannot fit.
    """
    device = jax.devices()[0]
    checkpoint = open_checkpoint(config.model, config.load_format, seed=config.seed)
    config = config.resolve(checkpoint.config, device.platform)
    # Rotary frequencies that depend on the context are laid out for the one that is served.
    model = dataclasses.replace(checkpoint.config, max_position_embeddings=config.max_model_len)
    family = get_family(model.architecture)
    specs = with_formats(family.param_specs(model), config.quantization, checkpoint.packed_kind)
    memory = plan_memory(
        config,
        model,
        params_bytes(specs, jnp.dtype(config.dtype)),
        state_bytes(config.max_num_seqs, model.vocab_size),
        device,
    )
    memory.check()
    if memory.disk_pages:  # Refused now, and not when all else is ready.
        DiskStore(config.disk_kv_dir, memory.disk_pages, memory.page_bytes).close()
    moves_pages = bool(memory.host_pages or memory.disk_pages or config.debug_kv)
    geometry = Geometry(config, model, family, specs, memory.num_pages, moves_pages)
    if config.attention_backend == "pallas":  # "auto" never refuses, it only warns.
        check_attention(geometry)
    return EnginePlan(config, checkpoint, geometry, memory, device)


def start(
    config: EngineConfig, log: EventLog, progress: Progress = no_progress
) -> tuple[EnginePlan, Tokenizer, Runner]:
    """Make a model ready to run: programs compile in threads while the weights stream in."""
    with log.phase("startup", "plan"):
        decided = plan(config)
        tokenizer = decided.checkpoint.tokenizer()
    compilation = decided.compile(progress, log)
    try:
        with log.phase("startup", "weights"):
            params = load_params(
                decided.checkpoint,
                decided.geometry.specs,
                dtype=decided.config.dtype,
                progress=functools.partial(progress, "weights"),
            )
    except BaseException:
        compilation.cancel()
        raise
    with log.phase("startup", "programs"):
        programs = compilation.result()
    decided = decided.with_programs(programs)
    with log.phase("startup", "memory"):
        runner = Runner(decided.geometry, params, programs)
    return decided, tokenizer, runner
