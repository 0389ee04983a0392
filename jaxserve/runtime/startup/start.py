"""Engine startup: plan, then compile programs while loading weights, then allocate."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable
from typing import Protocol

import jax

from jaxserve.core.events import EventLog
from jaxserve.core.settings.config import EngineConfig
from jaxserve.runtime.hardware.hosts import VERSIONS, Hosts, common_settings
from jaxserve.runtime.program_kinds import ProgramKinds
from jaxserve.runtime.programs.compilation.executables import Compilation, Program, Programs
from jaxserve.runtime.runner import Runner
from jaxserve.runtime.startup.engine_plan import EnginePlan, plan_engine
from jaxserve.runtime.startup.loading import load_draft_params, load_weights
from jaxserve.text import Tokenizer
from pallas_kernels import self_check

_log = logging.getLogger(__name__)


class StartupProgress(Protocol):
    """Callback for startup progress, called from any thread: part name, amount done, total."""

    def __call__(self, part: str, done: int, total: int) -> None: ...


def no_progress(part: str, done: int, total: int) -> None:
    """Ignores progress."""


def start(
    config: EngineConfig,
    log: EventLog,
    progress: StartupProgress = no_progress,
    hosts: Hosts | None = None,
) -> tuple[EnginePlan, Tokenizer, Runner]:
    """Make a model ready to run: programs compile in threads while weights load.

    Raises DistributedError when `hosts` differ in versions, settings or weights.
    """
    with log.phase("startup", "plan"):
        decided = _planned(config, hosts)
        tokenizer = decided.checkpoint.tokenizer()
    compilation = compile_programs(decided, progress, log)
    try:
        with log.phase("startup", "weights"):
            checkpoint, shapes = decided.checkpoint, decided.shapes
            weights = load_weights(checkpoint, shapes, functools.partial(progress, "weights"))
            draft_params = load_draft_params(
                decided.draft_checkpoint, shapes, functools.partial(progress, "draft model")
            )
    except BaseException:
        compilation.cancel()
        raise
    with log.phase("startup", "programs"):
        programs = compilation.result()
        if hosts is not None:
            again = functools.partial(compile_programs, decided, progress, log, cached=False)
            programs = alike_on_all(programs, hosts, lambda: again().result())
    decided = decided.with_programs(programs)
    _warn_of_dequantized(decided)
    with log.phase("startup", "memory"):
        runner = Runner(decided.shapes, weights, programs, draft_params)
    if hosts is not None:
        hosts.all_ready()
    return decided, tokenizer, runner


def _planned(config: EngineConfig, hosts: Hosts | None) -> EnginePlan:
    """The plan, the same on all hosts."""
    if hosts is None:
        return plan_engine(config)
    hosts.compare("asked", VERSIONS | common_settings(config))
    decided = plan_engine(config, hosts)
    hosts.compare("decided", decided.digests | common_settings(decided.config))
    return decided


def compile_programs(
    plan: EnginePlan,
    progress: StartupProgress = no_progress,
    log: EventLog | None = None,
    *,
    cached: bool = True,
) -> Compilation:
    """Start to compile every program of a plan, or to load it, unless `cached` is False."""
    all_specs = ProgramKinds(plan.shapes).specs()
    if jax.process_count() > 1 and plan.device.platform != "cpu":
        # Kernels are checked as they are traced, and every host must know which it may use.
        all_specs = [dataclasses.replace(spec, cached_by_name=False) for spec in all_specs]
    done: list[str] = []

    def on_done(program: Program) -> None:
        done.append(program.name)
        progress("programs", len(done), len(all_specs))

    def timed(name: str) -> contextlib.AbstractContextManager[None]:
        return log.phase("compile", name) if log else contextlib.nullcontext()

    return Compilation(
        all_specs,
        plan.cache if cached else None,
        on_done,
        timed,
        one_at_a_time=plan.device.platform == "gpu",
    )


def alike_on_all(
    programs: Programs, hosts: Hosts, compile_again: Callable[[], Programs]
) -> Programs:
    """`programs`, or those compiled again without the kernels that failed their self-check on any
    host: programs that run together must be the same."""
    for vote in itertools.count():
        ballots = hosts.gather(f"self-checks {vote}", self_check.failures())
        failed = {tuple(which): why for ballot in ballots for *which, why in ballot}
        if all(len(ballot) == len(failed) for ballot in ballots):
            return programs
        if len(ballots[hosts.host]) < len(failed):
            self_check.adopt(
                self_check.Failure(*which, f"on another host {why}")
                for which, why in failed.items()
            )
            jax.clear_caches()  # What was traced chose other kernels.
            programs = compile_again()


def _warn_of_dequantized(plan: EnginePlan) -> None:
    dequantized, quantized = plan.weights_dequantized
    if dequantized:
        _log.warning(
            "%d of %d weights stored as %s are dequantized to %s (docs/models.md says when)",
            dequantized,
            quantized,
            plan.checkpoint.quantization,
            plan.config.dtype,
        )
