"""Engines on target devices: by the file of a device, or by a measured profile."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jaxserve.core.devices import DeviceSpec, device_names, device_of_kind
from jaxserve.core.errors import ConfigError
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.steps.work import StepWork
from jaxserve.simulator.acceptance import DraftAcceptance
from jaxserve.simulator.deployments.deployment import Deployment
from jaxserve.simulator.layer_reads import LayerReads
from jaxserve.simulator.profile import Profile, ProfiledTimes
from jaxserve.simulator.roofline import Roofline
from jaxserve.simulator.step_times import PrefixSharing, StepTimes
from jaxserve.simulator.transfer_worker import Link

if TYPE_CHECKING:
    from jaxserve.runtime.programs.shapes.program import ProgramShapes
    from jaxserve.runtime.startup.engine_plan import EnginePlan

_LINK_LATENCY_S = 20e-6
"""Assumed of every transfer between the device, host memory and a disk."""


@dataclasses.dataclass(frozen=True)
class Described:
    """The plan of an engine, and where its step times are from: the `profile`, or without one the
    `spec`; with a profile, `spec` is of its device if that is known."""

    plan: EnginePlan
    spec: DeviceSpec | None
    profile: Profile | None

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        device: str | None,
        profile: Profile | None,
        *,
        propose: bool = True,
    ) -> Described:
        """`device` and `profile` together: the device that the profile was measured on.

        Raises ConfigError, ProfileMismatch, ModelError or MemoryPlanError, with alternatives if
        `propose`.
        """
        from jaxserve.runtime.hardware.devices import DescribedDevice
        from jaxserve.runtime.startup.engine_plan import plan_described

        if device is None and profile is None:
            raise ConfigError(
                f"give --device ({', '.join(device_names())}, or a TOML file) or --profile "
                "(a file of `jaxserve profile`)."
            )
        config = _counted(config)
        spec = None if device is None else DeviceSpec.of(device)
        if profile is None:
            target = DescribedDevice(
                spec.platform, spec.kind, spec.memory_bytes, spec.devices_per_host
            )
        else:
            target = DescribedDevice(
                profile.device["platform"],
                profile.device["kind"],
                profile.device["memory_bytes"],
            )
            spec = spec or device_of_kind(target.device_kind)
            if spec is not None and spec.platform != target.platform:
                raise ConfigError(
                    f"device is {spec.name}, but the profile was measured on {target.device_kind} "
                    f"({target.platform}); give the device that it was measured on, or one of both."
                )
        plan = plan_described(config, target, propose=propose)
        if profile is not None:
            profile.check(plan.config, sizes(plan.shapes))
            _check_measured(plan.config)
        return cls(plan, spec, profile)

    @property
    def work(self) -> StepWork:
        """What a step asks of each device."""
        from jaxserve.runtime.programs.forward.step_work import step_work

        return step_work(self.plan.shapes)

    @property
    def times(self) -> StepTimes:
        """Measured where there is a profile. Raises ConfigError when the device has no rate for the
        dtype."""
        if self.profile is None:
            return self.modelled
        shared = self._shared
        return self.profile if shared is None else ProfiledTimes(self.profile, shared)

    @property
    def modelled(self) -> StepTimes | None:
        """By the data sheet; None where that is not known. Raises as `times`."""
        from jaxserve.runtime.programs.forward.dual_batch import in_halves
        from jaxserve.runtime.programs.forward.step_work import draft_work

        if self.spec is None:
            return None
        shapes = self.plan.shapes
        return Roofline(
            self.spec,
            self.work,
            self.plan.memory.page_bytes,
            halves=frozenset(key for key in shapes.layouts if in_halves(shapes, key)),
            shared=self._shared,
            drafts=draft_work(shapes),
        )

    @property
    def _shared(self) -> PrefixSharing | None:
        from jaxserve.runtime.programs.forward.step_work import prefix_cost

        cost = prefix_cost(self.plan.shapes)
        return cost and PrefixSharing(cost, self.plan.config.page_size)

    @property
    def device_name(self) -> str:
        num_devices = self.plan.memory.num_devices
        name = self.plan.device.device_kind if self.profile is not None else self.spec.name
        return name if num_devices == 1 else f"{num_devices} x {name}"

    @property
    def load_us(self) -> int:
        """Time to begin an engine, whose programs are cached: that of reading its weights from the
        disk of its host."""
        disk_bytes_per_s = self.spec.disk_bytes_per_s if self.spec else DeviceSpec.disk_bytes_per_s
        memory = self.plan.memory
        num_bytes = (memory.weights_bytes + memory.host_weights_bytes) * memory.num_devices
        return round(num_bytes / disk_bytes_per_s * 1e6)

    @property
    def source(self) -> str:
        """Where step times are from."""
        return "measured (profile)" if self.profile is not None else "modelled (roofline)"

    @property
    def deployment(self) -> Deployment:
        """Without `acceptance` of drafts. Raises ConfigError when a profile has no rate of a link
        that the engine needs."""
        from jaxserve.runtime.programs.forward.step_work import prefix_cost

        plan, memory = self.plan, self.plan.memory
        spec = self.spec
        host_bytes_per_s = spec.host_bytes_per_s * spec.link_efficiency if spec else None
        if self.profile is not None:
            host_bytes_per_s = self.profile.host_bytes_per_s or host_bytes_per_s
        if host_bytes_per_s is None and (memory.host_pages or memory.disk_pages):
            raise ConfigError(
                "the profile has no rate of transfers to host memory; profile again with "
                f"host_kv_bytes {plan.config.host_kv_bytes}, or leave lower tiers out."
            )
        # Every device of an engine has a link of its own.
        host_bytes_per_s = (host_bytes_per_s or float("inf")) * memory.num_devices
        disk_bytes_per_s = spec.disk_bytes_per_s if spec else DeviceSpec.disk_bytes_per_s
        return Deployment(
            config=plan.config,
            buckets=plan.shapes.buckets,
            layout=memory.layout,
            num_pages=memory.num_pages,
            page_bytes=memory.whole_page_bytes,
            host_pages=0 if memory.kv_on_host else memory.host_pages,
            disk_pages=memory.disk_pages,
            host_link=Link(host_bytes_per_s, _LINK_LATENCY_S),
            disk_link=Link(disk_bytes_per_s, _LINK_LATENCY_S),
            prefix_cost=prefix_cost(plan.shapes),
            reads=self._reads(host_bytes_per_s, disk_bytes_per_s),
            host_kv=memory.host_kv,
        )

    def _reads(self, host_bytes_per_s: float, disk_bytes_per_s: float) -> LayerReads | None:
        """What steps read from below the device, at rates of all devices together; None where they
        read nothing. The steps of a profile have read what they need."""
        plan, memory, placement = self.plan, self.plan.memory, self.plan.shapes.placement
        if not placement.streamed and memory.host_kv is None:
            return None
        from jaxserve.runtime.planning.memory import group_pages

        weights_s = page_s = latency_s = 0.0
        if placement.streamed and self.profile is None:
            num_bytes = placement.streamed_bytes * memory.num_devices
            reads = [host_bytes_per_s]  # One after another: the disk's, then to the devices.
            if placement.tier == "disk":
                on_cpu = plan.device.platform == "cpu"  # Whose memory the devices have.
                reads = [disk_bytes_per_s] + reads * (not on_cpu)
            weights_s = sum(num_bytes / rate for rate in reads)
            weights_s += len(placement.streamed) * len(reads) * _LINK_LATENCY_S
        if memory.host_kv is not None and memory.has_kv_window:
            page_s = memory.whole_page_bytes / host_bytes_per_s
            latency_s = memory.layout.layers_per_page * _LINK_LATENCY_S
        return LayerReads(
            weights_s,
            page_s,
            latency_s,
            1 if memory.host_kv is None else group_pages(memory.host_kv),
            plan.config.steps_per_weight_read,
        )


def _check_measured(config: EngineConfig) -> None:
    """Raises ConfigError for settings of which a profile has no times."""
    for name, plain in (("kv_on", "device"), ("steps_per_weight_read", 1)):
        if getattr(config, name) != plain:
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}, and a profile has the times of steps that "
                "run alone, and read no KV from the host; leave it out, or give --device alone."
            )


def draft_acceptance(config: EngineConfig, rates: tuple[float, ...]) -> DraftAcceptance | None:
    """How drafts are accepted; None without speculation. Raises ConfigError where only one of the
    two is given, or the rates are out of range."""
    speculative = config.speculative_config
    if speculative is None:
        if rates:
            raise ConfigError(
                "draft_acceptance needs speculative_config, which makes the drafts; give both."
            )
        return None
    if not rates:
        raise ConfigError(
            "draft_acceptance is missing, and speculative_config needs it: which drafts are "
            "accepted depends on the text; give the share that is, such as 0.7, as /metrics of a "
            "server has it."
        )
    return DraftAcceptance(rates, config.seed, speculative.tree_depth)


def sizes(shapes: ProgramShapes) -> dict[str, int | str]:
    """What tells a model from another in a profile."""
    model = shapes.model
    return {
        "architecture": model.architecture,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "vocab_size": model.vocab_size,
    }


def _counted(config: EngineConfig) -> EngineConfig:
    """`devices` of devices that have no ids: one number is how many of them, over which layers are
    split where no other size takes them. Raises ConfigError."""
    if config.devices is None:
        return config
    if len(config.devices) > 1:
        raise ConfigError(
            f"devices is {config.devices}, but target devices have no ids; give their "
            "number, or leave it out and set the parallel sizes."
        )
    (count,) = config.devices
    if count < 1:
        raise ConfigError(f"devices is {count}; it must be 1 or more.")
    if config.num_devices == count:
        return dataclasses.replace(config, devices=None)
    if config.tensor_parallel_size == 1 and count % config.num_devices == 0:
        tensor = count // config.num_devices
        return dataclasses.replace(config, tensor_parallel_size=tensor, devices=None)
    raise ConfigError(
        f"devices is {count}, but the parallel sizes make {config.num_devices}; give sizes whose "
        "product is the number of devices, or leave tensor_parallel_size out, which then is the "
        "rest."
    )
