"""What commands that run several replicas check and ask before these are loaded."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Mapping

from jaxserve.core.errors import ConfigError


def check_replicas(num_replicas: int, of_one_engine: Mapping[str, object]) -> None:
    """Raises ConfigError for a setting of one engine that is given, and in a launched job,
    MissingDependencyError without Ray."""
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
    importlib.import_module("jaxserve.cluster.replicas.ray_replicas")


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
