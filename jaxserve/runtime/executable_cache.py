"""Compiled programs kept across runs, so that a warm start neither traces nor compiles.

An entry is a serialized executable, valid for exactly one digest of everything that shaped it:
our own source, JAX, the device, the host's instruction set, and the caller's description of model
and shapes. Loading one runs code, which is why the cache directory is private (cache_dir.py).
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
import platform
import tempfile
from pathlib import Path

import jax
import jaxlib
from jax.experimental import serialize_executable

from jaxserve.cache_dir import cache_directory

_SOURCE_PACKAGES = ("jaxserve/models", "jaxserve/runtime", "jaxserve/sampling", "pallas_kernels")


class ExecutableCache:
    """Executables of one engine description, by program name."""

    def __init__(self, description: str, device: jax.Device | None = None) -> None:
        """`description` is any text that determines the programs: config, shapes, options. They
        are for `device`, or for all that there are."""
        digest = hashlib.sha256(f"{_environment()}\n{description}".encode()).hexdigest()[:32]
        self.directory = cache_directory() / "programs" / digest
        self._devices = None if device is None else [device]

    def load(self, name: str) -> jax.stages.Compiled | None:
        """The executable stored under `name`; None when there is none or it cannot be read."""
        try:
            return serialize_executable.deserialize_and_load(
                *pickle.loads((self.directory / name).read_bytes()), execution_devices=self._devices
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


@functools.cache
def _environment() -> str:
    """What besides the description an executable depends on."""
    device = jax.devices()[0]
    return "\n".join(
        (
            jax.__version__,
            jaxlib.__version__,
            device.platform,
            device.device_kind,
            f"{len(jax.devices())} devices, host {jax.process_index()} of {jax.process_count()}",
            device.client.platform_version,
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
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for package in _SOURCE_PACKAGES:
        for suffix in ("py", "json"):
            for path in sorted((root / package).rglob(f"*.{suffix}")):
                digest.update(path.read_bytes())
    return digest.hexdigest()
