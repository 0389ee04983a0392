"""An engine's devices: their selection, their mesh, and their rates by specification."""

from __future__ import annotations

import dataclasses
import sys
from typing import Literal

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxserve.core.devices import device_of_kind
from jaxserve.core.errors import ConfigError
from jaxserve.core.settings.config import EngineConfig
from pallas_kernels.collective_matmul import CollectiveRates
from sharding_rules import MESH_AXES, make_mesh

_OTHER_RATES = CollectiveRates(1e11, 1e10, 1e10, hop_latency_us=10.0, both_ways=False)
"""For CPUs, whose virtual devices send by copying in memory, and for unlisted devices: links are
fast relative to arithmetic, so full chunks use ring attention."""


@dataclasses.dataclass(frozen=True)
class DescribedDevice:
    """Stands for a `jax.Device` that is not there, in plans: nothing can be put on it."""

    platform: Literal["gpu", "tpu", "cpu"]
    device_kind: str
    memory_bytes: int
    devices_per_host: int = sys.maxsize
    host_memory_bytes: int = sys.maxsize
    """Not known; as much as the defaults ask for."""

    def memory_stats(self) -> dict[str, int]:
        """As of a device without other programs."""
        return {"bytes_limit": self.memory_bytes}


def engine_devices(config: EngineConfig) -> list[jax.Device]:
    """The devices of an engine: those that `config.devices` names, in that order, or the first of
    this process, as many as the engine needs. An engine of several processes has all devices.

    Raises ConfigError for an unknown device, and when there are or are named too few.
    """
    devices = jax.devices()
    if jax.process_count() > 1:
        if config.devices is not None:
            raise ConfigError(
                f"devices is {config.devices}, but an engine of {jax.process_count()} processes "
                "runs on all their devices; leave devices out."
            )
        return devices
    if config.devices is None:
        if len(devices) < config.num_devices:
            raise ConfigError(
                f"{config.sizes} take {config.num_devices} devices, but there are only "
                f"{len(devices)}: {_ids(devices)}; choose sizes whose product is at most that."
            )
        return devices[: config.num_devices]
    config.check_device_ids()
    by_id = {device.id: device for device in devices}
    if unknown := [number for number in config.devices if number not in by_id]:
        raise ConfigError(
            f"devices is {config.devices}, but there is no device "
            f"{', '.join(map(str, unknown))}; there are {_ids(devices)}."
        )
    return [by_id[number] for number in config.devices]


def engine_mesh(config: EngineConfig, devices: list[jax.Device]) -> Mesh | None:
    """The mesh of an engine's devices; None for one device, which needs none.

    Raises ConfigError when they cannot make a mesh of the sizes that the config asks for.
    """
    if len(devices) == 1:
        return None
    try:
        return make_mesh(
            stage=config.pipeline_parallel_size,
            seq=config.context_parallel_size,
            tensor=config.tensor_parallel_size,
            devices=devices,
        )
    except ValueError as error:
        raise ConfigError(
            f"{config.sizes} cannot be a mesh of the devices {_ids(devices)}: {error}"
        ) from error


def described_mesh(config: EngineConfig) -> AbstractMesh | None:
    """An abstract mesh of the config's sizes; None for one device of one process."""
    if config.num_devices == 1 and jax.process_count() == 1:
        return None
    return AbstractMesh(
        (
            config.pipeline_parallel_size,
            config.context_parallel_size,
            config.tensor_parallel_size,
        ),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
    )


def collective_rates(device: jax.Device) -> CollectiveRates:
    """Rates of one device by its vendor's specification, to choose the programs of a mesh.

    The choice must be the same on all hosts and at every start, and is made before anything runs,
    so nothing is measured. Only ratios matter.
    """
    spec = device_of_kind(device.device_kind)
    if spec is None:
        return _OTHER_RATES
    return CollectiveRates(
        spec.flops_of("bfloat16"),
        spec.memory_bytes_per_s,
        spec.link_bytes_per_s,
        spec.hop_latency_s * 1e6,
        spec.both_ways,
    )


def _ids(devices: list[jax.Device]) -> str:
    """The ids of devices of one platform."""
    return f"{', '.join(str(device.id) for device in devices)} ({devices[0].platform})"
