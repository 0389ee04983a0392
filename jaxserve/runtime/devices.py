"""Selects an engine's devices and builds their mesh."""

from __future__ import annotations

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxserve.core.config import EngineConfig
from jaxserve.core.errors import ConfigError
from sharding_rules import MESH_AXES, make_mesh


def engine_devices(config: EngineConfig) -> list[jax.Device]:
    """The devices of an engine: those that `config.devices` names, in that order, or the first of
    this process, as many as the engine needs. An engine of several processes has all devices.

    Raises ConfigError for an unknown device, and when there are too few.
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
            1,
            config.pipeline_parallel_size,
            config.context_parallel_size,
            config.tensor_parallel_size,
        ),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
    )


def _ids(devices: list[jax.Device]) -> str:
    """The ids of devices of one platform."""
    return f"{', '.join(str(device.id) for device in devices)} ({devices[0].platform})"
