"""What commands that run several replicas check and ask before these are loaded."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Protocol

from jaxserve.cluster.policies.autoscale import check_bounds
from jaxserve.core.errors import ConfigError, MissingDependencyError


class ReplicaCounts(Protocol):
    """Options of a command that say how many replicas there are."""

    prefill_replicas: int
    decode_replicas: int
    min_replicas: int | None
    max_replicas: int | None


def check_replica_counts(command: ReplicaCounts, fixed: str) -> None:
    """Raises ConfigError for options that exclude each other. `fixed` is the command's option for a
    number of replicas that prefill and decode."""
    check_bounds(command.min_replicas, command.max_replicas)
    for name, other in itertools.permutations(("prefill_replicas", "decode_replicas")):
        if getattr(command, name) and getattr(command, other) < 1:
            raise ConfigError(
                f"{name} is {getattr(command, name)}, but {other} is {getattr(command, other)}; "
                "disaggregated prefill and decode take two replicas at least, one of each."
            )
    number = getattr(command, fixed)
    if command.prefill_replicas and number > 1:
        raise ConfigError(
            f"{fixed} is {number}, but prefill_replicas and decode_replicas say how many replicas "
            "there are; leave it out."
        )
    if command.max_replicas is None:
        return
    for name, default in ((fixed, 1), ("prefill_replicas", 0)):
        if (value := getattr(command, name)) != default:
            raise ConfigError(
                f"{name} is {value}, a fixed number of replicas, but max_replicas has it change "
                "with the load; leave one of them out."
            )


def check_replicas(
    num_replicas: int,
    of_one_engine: Mapping[str, object],
    asked_by: str = "data_parallel_size",
) -> None:
    """Raises ConfigError for a setting of one engine that is given, and in a launched job, and as
    `check_ray`; MissingDependencyError without Ray. `asked_by`: the option that asks for
    replicas."""
    import jax

    for name, value in of_one_engine.items():
        if value is not None:
            raise ConfigError(
                f"{name} is of one engine, but there are {num_replicas} replicas; leave one of "
                "them out."
            )
    if jax.distributed.is_initialized():
        raise ConfigError(
            "replicas are of one process, which starts them by Ray, and not of a launched job; "
            "leave jaxserve launch out."
        )
    try:
        from jaxserve.cluster.ray_replicas import check_ray

        check_ray()
    except MissingDependencyError as error:
        raise MissingDependencyError(
            f"{asked_by} asks for {num_replicas} replicas, but {error}"
        ) from error


def platform_of_replicas() -> str:
    """JAX's name for the platform that processes use here. Asked of another process: the devices
    are for the replicas, and this one would take memory of them."""
    named = os.environ.get("JAX_PLATFORMS", "").partition(",")[0]
    if named:
        return named
    asking = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
    told = subprocess.run(asking, capture_output=True, text=True)
    if told.returncode:
        raise ConfigError(f"JAX finds no devices: {told.stderr.strip().rpartition(chr(10))[2]}")
    return told.stdout.split()[-1]
