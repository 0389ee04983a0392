"""`jaxserve plan`: memory and capacity of an engine, without running it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.cli.arguments.options import Common, ModelSettings
from jaxserve.cli.planning.described import Described
from jaxserve.cli.planning.plan_tables import (
    by_scratch,
    capacity,
    heading,
    memory_table,
    num_parameters,
    pages_that_fit,
    placement_table,
    program_list,
    program_names,
    program_summary,
    requests_at_once,
    turn,
    turn_lengths,
    uncompiled_programs,
)
from jaxserve.cli.terminal.text import device_name
from jaxserve.core.errors import ConfigError
from jaxserve.core.process.terminal_progress import TerminalProgress
from jaxserve.simulator.profile import Profile

if TYPE_CHECKING:
    from jaxserve.runtime.programs.compilation.executables import Programs
    from jaxserve.runtime.startup.engine_plan import EnginePlan


@dataclasses.dataclass(frozen=True)
class Plan(Common):
    """Print the exact memory, capacity and programs of an engine, without reading its weights.

    For a model that does not fit, print what it needs, and settings with which it would fit.
    The programs are compiled, or loaded from the cache, because only the compiler knows how much
    scratch memory they need.

    With --device or --profile nothing is compiled: scratch memory is an estimate, and the times of
    one user's turn are added. Then --devices is a number of devices, for --tensor-parallel-size.
    With --exact as well, the programs are compiled by the compiler of those devices.

    Attributes:
        programs: list every program, with its scratch memory if it is compiled, and not only their
            number.
        json: print one JSON object, with all sizes in bytes and every program.
        device: plan for a100, b200, h100, h200, l4, v5e, v5p, v6e, or a TOML file with the fields
            of those, instead of the devices here.
        profile: plan for the machine on which `jaxserve profile` wrote this file; with --device as
            well, that machine's device, measured times are printed beside modelled ones.
        exact: of --device, compile every program to know its scratch memory: minutes for a large
            model. Needs the compiler of the device, a TPU or an h200: jax[tpu] or jax[cuda13].
    """

    engine: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    programs: bool = False
    json: bool = False
    device: str | None = None
    profile: Path | None = None
    exact: bool = False

    def run(self) -> int:
        if self.device is not None or self.profile is not None:
            return self._run_described()
        if self.exact:
            raise ConfigError("exact is for --device; plans for the devices here always are.")
        from jaxserve.runtime.startup import engine_plan
        from jaxserve.runtime.startup.start import compile_programs

        decided = engine_plan.decide(self.engine)
        if not decided.memory.fits and not self.json:
            print(heading(decided), memory_table(decided), sep="\n\n", flush=True)
        decided = engine_plan.accept(decided)
        with TerminalProgress() as progress:
            programs = compile_programs(decided, progress).result()
        decided = decided.with_programs(programs)
        if self.json:
            print(json.dumps(_document(decided, programs), default=str))
            return 0
        parts = [heading(decided), memory_table(decided), capacity(decided)]
        if decided.shapes.mesh is not None:
            parts.append(placement_table(decided.shapes))
        parts.append(program_list(programs) if self.programs else program_summary(programs))
        print(*parts, sep="\n\n")
        return 0

    def _run_described(self) -> int:
        programs: Programs | dict[str, Any] = {}
        if self.exact:
            from jaxserve.runtime.startup import deviceless

            deviceless.use_compilers_alone()
        profile = None if self.profile is None else Profile.read(self.profile)
        described = Described.of(self.engine, self.device, profile)
        plan = described.plan
        if self.exact:
            if described.spec is None or self.device is None:
                raise ConfigError("exact needs --device; a profile names no compiler.")
            with TerminalProgress() as progress:
                programs = deviceless.compile_programs_for(described.spec, plan, progress)
            plan = plan.with_programs(programs)
        prompt, screen = turn_lengths(plan)
        modelled = dataclasses.replace(described, profile=None)
        sessions = {
            name: of.deployment.session(times, prompt, screen)
            for name, of, times in (
                ("measured (profile)", described, described.profile and described.times),
                ("modelled (roofline)", modelled, described.modelled),
            )
            if times is not None
        }
        if self.json:
            shown = {
                "step_times": described.source,
                "session": {"prompt_tokens": prompt, "output_tokens": screen}
                | dataclasses.asdict(sessions[described.source]),
                "sessions": {name: dataclasses.asdict(times) for name, times in sessions.items()},
            }
            document = _document(plan, programs) | {"device": described.device_name} | shown
            if not programs:
                unknown = dict.fromkeys(("scratch_bytes", "result_bytes", "from_cache"))
                document["programs"] = [{"name": name} | unknown for name in program_names(plan)]
            print(json.dumps(document, default=str))
            return 0
        parts = [
            heading(plan, described.device_name),
            memory_table(plan, "program scratch" if programs else "program scratch, estimated"),
        ]
        parts += [capacity(plan), turn(described, sessions)]
        if plan.shapes.mesh is not None:
            parts.append(placement_table(plan.shapes))
        if programs:
            parts.append(program_list(programs) if self.programs else program_summary(programs))
        else:
            parts.append(uncompiled_programs(program_names(plan), self.programs))
        print(*parts, sep="\n\n")
        return 0


def _document(decided: EnginePlan, programs: Programs) -> dict[str, Any]:
    """What --json prints. Of the memory, `host` and `disk` are in all, the rest on each device."""
    memory = decided.memory
    sizes = ("weights", "lora", "kv", "state", "scratch", "staging", "host", "disk")
    sizes += ("host_weights", "disk_weights")
    sizes += ("total", "limit")
    settings = dataclasses.asdict(decided.config) | {"model": str(decided.checkpoint.path)}
    parameters, active = num_parameters(decided)
    return {
        "architecture": decided.shapes.model.architecture,
        "format": decided.checkpoint.format,
        "parameters": parameters,
        "active_parameters": active,
        "device": device_name(decided.device),
        "num_devices": memory.num_devices,
        "settings": settings,
        "memory_bytes": {name: getattr(memory, f"{name}_bytes") for name in sizes},
        "weights_dequantized": decided.weights_dequantized[0],
        "kv_pool": {
            "pages": memory.num_pages,
            "page_size": memory.page_size,
            "tokens": memory.kv_tokens,
            "groups": [dataclasses.asdict(group) for group in memory.layout.groups],
            "longest_tokens": memory.longest_tokens,
            "most_bytes": pages_that_fit(memory) * memory.page_bytes,
        },
        "requests_at_once": [
            {"tokens": length, "requests": number} for length, number in requests_at_once(decided)
        ],
        "programs": [
            {
                "name": program.name,
                "scratch_bytes": program.temp_bytes,
                "result_bytes": program.output_bytes,
                "from_cache": program.from_cache,
            }
            for program in by_scratch(programs)
        ],
    }
