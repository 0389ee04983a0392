"""An engine's state on disk: one directory, always whole.

A manifest names the other files, with the size and the checksum of each. Files have names of their
own in every checkpoint, and the manifest is replaced last, in one stroke: whoever is killed at any
moment leaves the checkpoint that was there before, or the new one. The state is JSON, KV is in
safetensors files; nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the bfloat16 that safetensors asks it for)
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from jaxserve.errors import CheckpointError
from jaxserve.output_file import sync_directory

VERSION = 1
"""Of the format. A reader knows its own and all before."""

MANIFEST = "manifest.json"
_OWN_FILES = re.compile(r"[0-9a-f]{16}-.*\.(json|safetensors)")
_BLOCK_BYTES = 1 << 20
_ROWS = "kv"


def exists(directory: str | Path) -> bool:
    """Whether there is a checkpoint in a directory."""
    return (Path(directory) / MANIFEST).is_file()


def discard(directory: str | Path) -> None:
    """Removes the checkpoint of a directory, if it has one."""
    (Path(directory) / MANIFEST).unlink(missing_ok=True)
    _sweep(Path(directory), keep=())


def check_writable(directory: str | Path) -> None:
    """Raises CheckpointError, as a CheckpointWriter would, for a directory that cannot be one's."""
    writer = CheckpointWriter(directory)
    writer.add_json("probe", None)
    writer._path("probe.json").unlink()


class CheckpointWriter:
    """Writes one checkpoint. Nothing counts before `commit`; after each, all that was written."""

    def __init__(self, directory: str | Path) -> None:
        """Makes the directory where there is none, for its owner alone: prompts are private.

        Raises CheckpointError when it cannot, or when the directory has other people's files.
        """
        self.directory = Path(directory)
        self._stamp = f"{time.time_ns():016x}"[-16:]
        self._files: dict[str, dict[str, int]] = {}
        with self._refused():
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            others = [name for name in os.listdir(self.directory) if not _is_ours(name)]
        if others:
            raise CheckpointError(
                f"{self.directory} holds {sorted(others)[0]!r}, which is no checkpoint's; give a "
                "directory of its own, new or empty."
            )

    def add_json(self, name: str, content: Any) -> None:
        self._add(f"{name}.json", json.dumps(content).encode())

    def add_rows(self, name: str, rows: np.ndarray) -> None:
        """Adds an array; a reader can take some of its rows."""
        self._add(f"{name}.safetensors", save({_ROWS: np.ascontiguousarray(rows)}))

    def commit(self, facts: dict[str, Any]) -> None:
        """Makes this the checkpoint of the directory. `facts` say whose state it is.

        Raises CheckpointError when the disk refuses.
        """
        manifest = {"version": VERSION, "facts": facts, "stamp": self._stamp, "files": self._files}
        with self._refused():
            temporary = self.directory / f"{self._stamp}-{MANIFEST}"
            _write(temporary, json.dumps(manifest, indent=1).encode())
            os.replace(temporary, self.directory / MANIFEST)
            sync_directory(self.directory)
        _sweep(self.directory, keep=[self._path(name).name for name in self._files])

    def _add(self, name: str, data: bytes) -> None:
        with self._refused():
            _write(self._path(name), data)
        self._files[name] = {"bytes": len(data), "crc32": zlib.crc32(data)}

    def _path(self, name: str) -> Path:
        return self.directory / f"{self._stamp}-{name}"

    @contextlib.contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"a checkpoint cannot be written to {self.directory} ({error.strerror}); give a "
                "directory with room that you may write to."
            ) from error


class CheckpointReader:
    """A checkpoint that was found whole: every file is what was written."""

    def __init__(self, directory: str | Path) -> None:
        """Raises CheckpointError where there is none, for a newer version, and for damage."""
        self.directory = Path(directory)
        try:
            manifest = json.loads((self.directory / MANIFEST).read_bytes())
            version = manifest["version"]
            if type(version) is not int or version > VERSION:
                raise CheckpointError(
                    f"the checkpoint in {self.directory} has version {version} of the format, and "
                    f"this jaxserve reads up to {VERSION}; restore it with a newer one."
                )
            self.facts: dict[str, Any] = manifest["facts"]
            self._stamp: str = manifest["stamp"]
            self._files: dict[str, dict[str, int]] = manifest["files"]
            for name, written in self._files.items():
                self._check(name, written["bytes"], written["crc32"])
        except FileNotFoundError as error:
            raise CheckpointError(
                f"there is no whole checkpoint in {self.directory}: "
                f"{Path(error.filename).name} is missing."
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint in {self.directory} cannot be read: {error.strerror}."
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{self.directory / MANIFEST} is damaged ({error!r}); it cannot be restored."
            ) from error

    def has(self, name: str) -> bool:
        """Whether there is a JSON file of this name."""
        return f"{name}.json" in self._files

    def json(self, name: str) -> Any:
        return json.loads(self._path(f"{name}.json").read_bytes())

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start .. stop - 1 of an array. Raises CheckpointError when they cannot be read."""
        path = self._path(f"{name}.safetensors")
        try:
            with safe_open(path, framework="numpy") as file:
                return file.get_slice(_ROWS)[start:stop]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}.") from error

    def _check(self, name: str, num_bytes: int, crc32: int) -> None:
        path = self._path(name)
        found_bytes, found = 0, 0
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                found_bytes += len(block)
                found = zlib.crc32(block, found)
        if (found_bytes, found) != (num_bytes, crc32):
            raise CheckpointError(
                f"{path} has {found_bytes} bytes with checksum {found:08x}, but {num_bytes} bytes "
                f"with checksum {crc32:08x} were written; it cannot be restored."
            )

    def _path(self, name: str) -> Path:
        return self.directory / Path(f"{self._stamp}-{name}").name


def _is_ours(name: str) -> bool:
    return name == MANIFEST or _OWN_FILES.fullmatch(name) is not None


def _sweep(directory: Path, keep: Iterable[str]) -> None:
    """Removes files of checkpoints that count no more."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if name != MANIFEST and name not in keep and _is_ours(name):
                os.unlink(directory / name)


def _write(path: Path, data: bytes) -> None:
    """A new file for its owner alone, on the disk when this returns."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
