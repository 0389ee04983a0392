"""`jaxserve profile`: measure the steps of an engine on this machine, for simulations of it."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.cli.arguments.options import Common, ModelSettings
from jaxserve.cli.planning.described import sizes
from jaxserve.core.errors import ConfigError
from jaxserve.core.events import EventLog
from jaxserve.core.process.output_file import check_output_file
from jaxserve.core.process.tables import table
from jaxserve.core.process.terminal_progress import TerminalProgress
from jaxserve.kv.tier import Tier
from jaxserve.simulator.profile import Profile as MeasuredProfile
from jaxserve.simulator.profile import StepSample, fitted

if TYPE_CHECKING:
    from jaxserve.runtime.runner import Runner
    from jaxserve.runtime.startup.engine_plan import EnginePlan
    from jaxserve.runtime.startup.start import StartupProgress


@dataclasses.dataclass(frozen=True)
class Profile(Common):
    """Measure the steps of an engine on this machine, for `jaxserve simulate --profile`.

    Loads the model, times every forward program at a few context lengths, with greedy sampling,
    and fits the cost of attention. Nothing else should run meanwhile.

    Attributes:
        out: the JSON file to write.
    """

    engine: ModelSettings = dataclasses.field(default_factory=ModelSettings)
    out: Path = Path("profile.json")

    def __post_init__(self) -> None:
        """Raises ConfigError when `out` cannot be written, and for steps that do not run alone."""
        check_output_file("out", self.out)
        if self.engine.steps_per_weight_read > 1:
            raise ConfigError(
                f"steps_per_weight_read is {self.engine.steps_per_weight_read}, but only steps "
                "that run alone have a time of their own; leave it out."
            )

    def run(self) -> int:
        from jaxserve.runtime.startup.start import start

        with TerminalProgress() as progress:
            plan, _, runner = start(self.engine, EventLog(), progress)
            profile = measured_profile(plan, runner, progress)
        profile.write(self.out)
        rows = [("program", "without attention", "1,000 tokens of context", "1,000,000 pairs")]
        rows += [
            (str(key), *(f"{s * 1e3:,.3f} ms" for s in (base, 1e3 * context, 1e6 * pair)))
            for key, (base, context, pair) in profile.programs.items()
        ]
        held_out = profile.held_out
        print(table(rows))
        print(
            f"\n{held_out.samples} held-out steps are predicted with a median error of "
            f"{held_out.median:.1%}, at most {held_out.most:.1%}"
        )
        return 0


def measured_profile(
    plan: EnginePlan, runner: Runner, progress: StartupProgress
) -> MeasuredProfile:
    """Measures a runner that serves nothing else."""
    from jaxserve.runtime.hardware.device_memory import device_memory
    from jaxserve.runtime.open_kv import open_kv
    from jaxserve.runtime.step_measurement import StepMeasurements

    steps, samples = StepMeasurements(plan.shapes, runner), []
    for done, total, measured in steps.run():
        progress("steps", done, total)
        if measured is not None:
            key, load, seconds, held_out = measured
            samples.append(StepSample(key, load.context_tokens, load.num_pairs, seconds, held_out))
    programs, held_out = fitted(samples)
    host_bytes_per_s = None
    if plan.memory.host_pages:
        with contextlib.closing(open_kv(plan, runner, EventLog())) as kv:
            rate = kv.manager.rates.bytes_per_s(Tier.DEVICE, Tier.HOST)
        host_bytes_per_s = rate and rate / plan.memory.num_devices
    return MeasuredProfile(
        settings=plan.config.of_programs(),
        model=sizes(plan.shapes),
        device={
            "platform": plan.device.platform,
            "kind": plan.device.device_kind,
            "memory_bytes": device_memory(plan.device),
        },
        host_bytes_per_s=host_bytes_per_s,
        page_copy_s=steps.page_copy_s(),
        programs=programs,
        held_out=held_out,
    )
