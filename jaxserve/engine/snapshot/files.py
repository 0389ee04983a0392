"""Snapshot directories, replaced atomically.

A manifest lists the other files, with the size and checksum of each. Every snapshot uses new file
names, and the manifest is replaced atomically at the end: a process killed at any moment leaves
either the previous snapshot or the new one. The state is JSON, KV is in safetensors files; nothing
is ever unpickled.
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

import ml_dtypes  # also gives numpy the bfloat16 that safetensors asks it for
import numpy as np
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save

from jaxserve.core.errors import SnapshotError
from jaxserve.core.process.output_file import sync_directory

VERSION = 1
"""Format version. Readers support all versions up to their own."""

MANIFEST = "manifest.json"
_OWN_FILES = re.compile(r"[0-9a-f]{16}-.*\.(json|safetensors)")
_BLOCK_BYTES = 1 << 20
_ROWS = "kv"


def exists(directory: str | Path) -> bool:
    """Whether a directory holds a snapshot."""
    return (Path(directory) / MANIFEST).is_file()


def discard(directory: str | Path) -> None:
    """Removes a directory's snapshot, if it has one."""
    (Path(directory) / MANIFEST).unlink(missing_ok=True)
    _sweep(Path(directory), keep=())


def check_writable(directory: str | Path) -> None:
    """Raises SnapshotError for a directory to which SnapshotWriter could not write."""
    writer = SnapshotWriter(directory)
    writer.add("probe", None)
    writer._path("probe.json").unlink()


class RowsMissing(SnapshotError):
    """Rows of KV that a snapshot lists and does not have: to be recomputed."""


_DTYPES: dict[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I8": np.int8,
    "U8": np.uint8,
}
"""Those of KV, by their names in safetensors."""


def encoded(name: str, content: Any) -> tuple[str, bytes]:
    """The name and the bytes of a file: of an array safetensors, of anything else JSON."""
    if isinstance(content, np.ndarray):
        return f"{name}.safetensors", save({_ROWS: np.ascontiguousarray(content)})
    return f"{name}.json", json.dumps(content).encode()


def decoded_rows(data: bytes) -> np.ndarray:
    """The array of a safetensors file. Not by `safetensors.numpy.load`: its table of dtypes has no
    bfloat16 in some versions (0.8.0)."""
    found = dict(deserialize(data))[_ROWS]
    return np.frombuffer(found["data"], _DTYPES[found["dtype"]]).reshape(found["shape"])


class SnapshotWriter:
    """Writes one snapshot. Each `commit` makes everything written so far part of it."""

    def __init__(self, directory: str | Path) -> None:
        """Creates the directory if missing, with access for its owner only: prompts are private.

        Raises SnapshotError when that fails, or when the directory holds other files.
        """
        self.directory = Path(directory)
        self._stamp = f"{time.time_ns():016x}"[-16:]
        self._files: dict[str, dict[str, int]] = {}
        with self._refused():
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            others = [name for name in os.listdir(self.directory) if not _is_ours(name)]
        if others:
            raise SnapshotError(
                f"{self.directory} holds {sorted(others)[0]!r}, which is not a snapshot file; give "
                "a new or empty directory."
            )

    def add(self, name: str, content: Any) -> None:
        """Adds JSON, or an array of which a reader can load any rows."""
        name, data = encoded(name, content)
        with self._refused():
            _write(self._path(name), data)
        self._files[name] = {"bytes": len(data), "crc32": zlib.crc32(data)}

    def commit(self, facts: dict[str, Any]) -> None:
        """Makes this the directory's snapshot. `facts`: its model and KV format.

        Raises SnapshotError when writing fails.
        """
        manifest = {"version": VERSION, "facts": facts, "stamp": self._stamp, "files": self._files}
        with self._refused():
            temporary = self.directory / f"{self._stamp}-{MANIFEST}"
            _write(temporary, json.dumps(manifest, indent=1).encode())
            os.replace(temporary, self.directory / MANIFEST)
            sync_directory(self.directory)
        _sweep(self.directory, keep=[self._path(name).name for name in self._files])

    def _path(self, name: str) -> Path:
        return self.directory / f"{self._stamp}-{name}"

    @contextlib.contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SnapshotError(
                f"a snapshot cannot be written to {self.directory} ({error.strerror}); give a "
                "writable directory with free space."
            ) from error


class SnapshotReader:
    """A verified snapshot: every file has the size and checksum it was written with.

    Attributes:
        facts: what its engine said of itself.
        checksum: of its manifest, which tells it from others.
    """

    in_order = False
    """Rows can be read in any order."""

    def __init__(self, directory: str | Path) -> None:
        """Raises SnapshotError when there is no snapshot, or it is newer or damaged."""
        self.directory = Path(directory)
        try:
            written = (self.directory / MANIFEST).read_bytes()
            self.checksum = zlib.crc32(written)
            manifest = json.loads(written)
            version = manifest["version"]
            if type(version) is not int or version > VERSION:
                raise SnapshotError(
                    f"the snapshot in {self.directory} has format version {version}, but this "
                    f"jaxserve reads up to {VERSION}; restore it with a newer jaxserve."
                )
            self.facts: dict[str, Any] = manifest["facts"]
            self._stamp: str = manifest["stamp"]
            self._files: dict[str, dict[str, int]] = manifest["files"]
            for name, fields in self._files.items():
                self._check(name, fields["bytes"], fields["crc32"])
        except FileNotFoundError as error:
            raise SnapshotError(
                f"there is no complete snapshot in {self.directory}: "
                f"{Path(error.filename).name} is missing."
            ) from error
        except OSError as error:
            raise SnapshotError(
                f"the snapshot in {self.directory} cannot be read: {error.strerror}."
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SnapshotError(
                f"{self.directory / MANIFEST} is damaged ({error!r}); it cannot be restored."
            ) from error

    def has(self, name: str) -> bool:
        """Whether the snapshot has a JSON file of this name."""
        return f"{name}.json" in self._files

    def json(self, name: str) -> Any:
        """Raises SnapshotError when it cannot be read."""
        path = self._path(f"{name}.json")
        try:
            return json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise SnapshotError(f"{path} cannot be read: {error}.") from error

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start .. stop - 1 of an array. Raises RowsMissing when it is none of the snapshot's,
        SnapshotError when they cannot be read."""
        if f"{name}.safetensors" not in self._files:
            raise RowsMissing(f"the snapshot in {self.directory} has no {name}.")
        path = self._path(f"{name}.safetensors")
        try:
            with safe_open(path, framework="numpy") as file:
                return file.get_slice(_ROWS)[start:stop]
        except (SafetensorError, OSError) as error:
            raise SnapshotError(f"{path} cannot be read: {error}.") from error

    def forget(self, name: str) -> None:
        """Does nothing: files stay on disk."""

    def _check(self, name: str, num_bytes: int, crc32: int) -> None:
        path = self._path(name)
        found_bytes, found = 0, 0
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                found_bytes += len(block)
                found = zlib.crc32(block, found)
        if (found_bytes, found) != (num_bytes, crc32):
            raise SnapshotError(
                f"{path} has {found_bytes} bytes with checksum {found:08x}, but {num_bytes} bytes "
                f"with checksum {crc32:08x} were written; it cannot be restored."
            )

    def _path(self, name: str) -> Path:
        return self.directory / Path(f"{self._stamp}-{name}").name


def _is_ours(name: str) -> bool:
    return name == MANIFEST or _OWN_FILES.fullmatch(name) is not None


def _sweep(directory: Path, keep: Iterable[str]) -> None:
    """Removes files of superseded snapshots."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if name != MANIFEST and name not in keep and _is_ours(name):
                os.unlink(directory / name)


def _write(path: Path, data: bytes) -> None:
    """Writes a new file, readable by its owner only, and syncs it to disk."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
