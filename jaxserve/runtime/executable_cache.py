"""Compiled programs kept across runs, so that a warm start neither traces nor compiles.

An entry is a serialized executable, valid for exactly one digest of everything that shaped it:
the source files it was made of (program_sources.py), JAX, the devices it is for, the host's
instruction set, and the caller's description of model and shapes. Loading one runs code, which is
why the cache directory is private (cache_dir.py).
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax
import jaxlib
from jax.experimental import serialize_executable

from jaxserve.cache_dir import cache_directory
from jaxserve.runtime.program_sources import program_sources


class ExecutableCache:
    """Executables of one engine description, by program name."""

    def __init__(self, description: str, devices: Sequence[jax.Device]) -> None:
        """`description` is any text that determines the programs: config, shapes, options.

        They are for `devices`, in the order of the mesh. An executable names its devices, so that
        engines on others, be they alike, have entries of their own.
        """
        parts = (_environment(), _devices(devices), description)
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
        self.directory = cache_directory() / "programs" / digest
        self._devices = list(devices)

    def load(self, name: str) -> jax.stages.Compiled | None:
        """The executable stored under `name`; None when there is none or it cannot be read."""
        try:
            return serialize_executable.deserialize_and_load(
                *pickle.loads((self.directory / name).read_bytes()),
                backend=self._devices[0].client,
                execution_devices=self._devices,
            )
        except FileNotFoundError:
            return None
        except Exception:
            # A truncated or foreign entry is as good as none: it is compiled anew and replaced.
            return None

    def store(self, name: str, compiled: jax.stages.Compiled) -> None:
        """Keep `compiled` under `name`, atomically. A full or read-only disk only costs the
        next start its head start, so it is not an error."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            payload = pickle.dumps(serialize_executable.serialize(compiled))
            handle, temporary = tempfile.mkstemp(dir=self.directory)
            with os.fdopen(handle, "wb") as file:
                file.write(payload)
            os.replace(temporary, self.directory / name)
        except OSError:
            return


def _devices(devices: Sequence[jax.Device]) -> str:
    """What an executable depends on of the devices it is for."""
    ids = ", ".join(f"{device.id} {device.device_kind}" for device in devices)
    client = devices[0].client
    host = f"host {jax.process_index()} of {jax.process_count()}"
    return "\n".join((client.platform, client.platform_version, ids, host))


@functools.cache
def _environment() -> str:
    """What besides the description and the devices an executable depends on."""
    return "\n".join(
        (
            jax.__version__,
            jaxlib.__version__,
            os.environ.get("XLA_FLAGS", ""),
            _instruction_set(),
            _source_digest(),
        )
    )


def _instruction_set() -> str:
    """The CPU's feature flags: CPU executables hold machine code for exactly these."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}"


def _source_digest() -> str:
    digest = hashlib.sha256()
    for path in program_sources():
        digest.update(path.read_bytes())
    return digest.hexdigest()
