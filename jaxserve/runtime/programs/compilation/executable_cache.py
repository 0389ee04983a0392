"""Persistent cache of compiled programs, so that a warm start neither traces nor compiles.

An entry is a serialized executable, keyed by a digest of everything it depends on: its source files
(program_sources.py), JAX, the devices, the host's instruction set, and the caller's description of
model and shapes. A program not found that way is lowered and looked up by its StableHLO: changed
settings often leave most programs unchanged, and only the rest is compiled. Loading an entry runs
code, so the cache directory is private (core/process/cache_dir.py).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import pickle
import platform
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jaxlib
from jax.experimental import serialize_executable

from jaxserve.core.process.cache_dir import cache_directory
from jaxserve.runtime.programs.compilation.program_sources import program_sources

_log = logging.getLogger(__name__)


class ExecutableCache:
    """Executables of one engine description, by program name.

    Each program's file in `directory` is a hard link to one in `programs/lowered`, shared by all
    engine descriptions with the same program of the same name.
    """

    def __init__(self, description: str, devices: Sequence[jax.Device]) -> None:
        """`description` is any text that determines the programs: config, shapes, options.

        `devices` are in mesh order. An executable keeps the devices it was compiled for, also when
        JAX loads it with others (tried with 0.10.2 on CPUs), so engines on other devices, even
        identical ones, have separate entries.
        """
        programs = cache_directory() / "programs"
        self.directory = programs / _digest("\n".join((_devices(devices), description)))
        self._lowered = programs / "lowered"
        self._description, self._devices = description, list(devices)

    def on(self, devices: Sequence[jax.Device]) -> ExecutableCache:
        """The cache of the same engine's programs on other devices."""
        return ExecutableCache(self._description, devices)

    def load(self, name: str) -> jax.stages.Compiled | None:
        """The executable stored under `name`; None when there is none or it cannot be read."""
        return self._read(self.directory / name)

    def load_entry(self, name: str, entry: Path) -> jax.stages.Compiled | None:
        """The executable that any engine description stored as this `entry`, now stored under
        `name` as well; None when there is none or it cannot be read."""
        compiled = self._read(entry)
        if compiled is not None:
            self._link(entry, name)
        return compiled

    def store(self, name: str, entry: Path, compiled: jax.stages.Compiled) -> None:
        """Store `compiled` under `name` and as `entry`. A full or read-only disk is not an error,
        but a warning: the next start compiles again."""
        try:
            payload = pickle.dumps(serialize_executable.serialize(compiled))
            _replace(entry, lambda temporary: temporary.write_bytes(payload))
        except OSError as error:
            _warn_of(self.directory.parent, error.strerror)
            return
        self._link(entry, name)

    def entry(self, name: str, lowered: jax.stages.Lowered) -> Path:
        """Where the executable of a program is that was lowered to this computation, if it is."""
        # An entry has the code, the trees of arguments and results, and which arguments the code
        # uses. Those that it does not use are left out of its text, so that two layers of one kind
        # have the same text, whichever KV group's pages each of them writes: their names differ.
        trees = (lowered.in_tree, lowered.args_info, lowered.out_tree)
        parts = (name, _devices(self._devices), *trees)
        return self._lowered / _digest("\n".join((*map(str, parts), lowered.as_text())))

    def _read(self, path: Path) -> jax.stages.Compiled | None:
        try:
            return serialize_executable.deserialize_and_load(
                *pickle.loads(path.read_bytes()),
                backend=self._devices[0].client,
                execution_devices=self._devices,
            )
        except FileNotFoundError:
            return None
        except Exception:
            # A truncated or foreign entry counts as missing: it is recompiled and replaced.
            return None

    def _link(self, path: Path, name: str) -> None:
        def link_or_copy(temporary: Path) -> None:
            try:
                os.link(path, temporary)
            except OSError:  # A file system without hard links.
                shutil.copyfile(path, temporary)

        with contextlib.suppress(OSError):
            _replace(self.directory / name, link_or_copy)


@functools.cache
def _warn_of(directory: Path, why: str | None) -> None:
    """Once for all programs."""
    _log.warning(
        "compiled programs cannot be stored in %s (%s): the next start compiles them again; set "
        "JAXSERVE_CACHE to a directory with room.",
        directory,
        why,
    )


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Creates the file `path` atomically; `write(temporary)` writes its content."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent.parent) as directory:
        temporary = Path(directory) / path.name
        write(temporary)
        os.replace(temporary, path)


def _digest(text: str) -> str:
    return hashlib.sha256(f"{_environment()}\n{text}".encode()).hexdigest()[:32]


def _devices(devices: Sequence[jax.Device]) -> str:
    """Properties of its devices that an executable depends on."""
    ids = ", ".join(f"{device.id} {device.device_kind}" for device in devices)
    client = devices[0].client
    host = f"host {jax.process_index()} of {jax.process_count()}"
    return "\n".join((client.platform, client.platform_version, ids, host))


@functools.cache
def _environment() -> str:
    """What an executable depends on, other than the description and the devices."""
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
