"""Layers outside device memory: in host memory, or in a file."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from jaxserve.core.errors import ConfigError, WeightsError
from jaxserve.core.process.cache_dir import cache_directory
from jaxserve.models.family import Params
from jaxserve.models.loading.assemble import aligned_empty
from jaxserve.runtime.weights.layer_layout import LayerLayout

_PAGE = 4096
_UNFINISHED = ".unfinished"
"""Ends the names of files that are being written."""


class LayerStore(Protocol):
    """Layers that one thread reads."""

    def load(self, layer: int, slot: int) -> Params:
        """A layer's parameters on the devices. `slot`: its place in the window, whose last layer
        nothing uses any more. Raises WeightsError when it cannot be read."""

    def load_unread(self, layer: int, slot: int) -> Params:
        """As `load`, but nothing is read from disk: the values are undefined."""

    def close(self) -> None: ...


class HostLayerStore:
    """Layers in host memory."""

    def __init__(self, layouts: Sequence[LayerLayout]) -> None:
        self._layouts = layouts
        self._buffers: dict[int, np.ndarray] = {}

    def put(self, layer: int, params: Params) -> None:
        """Add a layer. Raises WeightsError when the host has no memory for it."""
        layout = self._layouts[layer]
        try:
            self._buffers[layer] = aligned_empty((layout.num_bytes,), np.uint8)
        except MemoryError as error:
            raise WeightsError(
                f"weights_on is 'host', but the host has no memory for layer {layer} of "
                f"{layout.num_bytes} bytes; set weights_on to 'disk'."
            ) from error
        layout.pack(params, self._buffers[layer])

    def load(self, layer: int, slot: int) -> Params:
        return self._layouts[layer].unpack(self._buffers[layer])

    def load_unread(self, layer: int, slot: int) -> Params:
        return self.load(layer, slot)

    def close(self) -> None:
        self._buffers.clear()


def check_room(num_bytes: int) -> None:
    """Raises ConfigError when the disk of the cache directory has no room for layers."""
    free = shutil.disk_usage(cache_directory()).free
    if free < num_bytes:
        raise ConfigError(
            f"weights_on is 'disk', and the layers take {num_bytes} bytes, but "
            f"{cache_directory()} has {free} left; set JAXSERVE_CACHE to a directory with more, or "
            "weights_on to 'host'."
        )


class LayerFile:
    """A file of all layers as the devices hold them, one after another at multiples of a page."""

    def __init__(self, path: Path, layouts: Sequence[LayerLayout]) -> None:
        self.path = path
        self._layouts = layouts
        self._offsets = [0]
        for layout in layouts:
            self._offsets.append(self._offsets[-1] + layout.num_bytes + -layout.num_bytes % _PAGE)

    @classmethod
    def of(cls, description: str, layouts: Sequence[LayerLayout]) -> LayerFile:
        """The file of the cache directory for weights that `description` determines."""
        name = hashlib.sha256(description.encode()).hexdigest()[:32]
        return cls(cache_directory() / "weights" / f"{name}.layers", layouts)

    @property
    def num_bytes(self) -> int:
        return self._offsets[-1]

    @property
    def complete(self) -> bool:
        """Whether the file is there, whole."""
        try:
            return self.path.stat().st_size == self.num_bytes
        except OSError:
            return False

    def check_room(self) -> None:
        """Raises ConfigError when the file is missing, and the disk has no room for it, not even
        once what killed processes have left unfinished is deleted."""
        if not self.complete:
            _delete_abandoned(self.path.parent)
            check_room(self.num_bytes)

    def write(self, layers: Iterable[Params]) -> None:
        """Create the file, of all layers in order; another process never sees a part of it.
        Raises WeightsError when it cannot be written."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _unfinished(self.path) as (name, file):
                for layout, params in zip(self._layouts, layers, strict=True):
                    buffer = np.zeros(layout.num_bytes + -layout.num_bytes % _PAGE, np.uint8)
                    layout.pack(params, buffer)
                    file.write(buffer)
                file.flush()
                os.fsync(file.fileno())
                os.replace(name, self.path)
        except OSError as error:
            raise WeightsError(
                f"weights_on is 'disk', but {self.path} cannot be written ({error.strerror}); set "
                "JAXSERVE_CACHE to another directory, or weights_on to 'host'."
            ) from error

    def open(self, num_slots: int) -> FileStore:
        """The layers of the file, with buffers for `num_slots` of them."""
        return FileStore(self.path, self._layouts, self._offsets, num_slots)


@contextlib.contextmanager
def _unfinished(path: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file beside `path`, to be renamed to it; deleted at the end where it was not. It is
    locked until then, and a process that is killed has no locks."""
    while True:
        descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=_UNFINISHED)
        with contextlib.suppress(OSError):  # Without locks it may stay.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)  # Another process has deleted it before it was locked.
    with open(descriptor, "wb") as file:
        try:
            yield Path(name), file
        finally:
            Path(name).unlink(missing_ok=True)


def _delete_abandoned(directory: Path) -> None:
    """Deletes unfinished files whose process was killed."""
    for path in directory.glob("*" + _UNFINISHED):
        with contextlib.suppress(OSError), path.open("r+b") as file:  # Another is writing it.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


class FileStore:
    """Layers in a file, copied to one buffer for each slot of the window.

    They are read, and not memory-mapped: a read that fails is an error of ours, where one behind
    a map would be a signal that ends the process (docs/decisions/016-streamed-weights.md).
    """

    def __init__(
        self,
        path: Path,
        layouts: Sequence[LayerLayout],
        offsets: Sequence[int],
        num_slots: int,
    ) -> None:
        self._path, self._layouts, self._offsets = path, layouts, offsets
        largest = max(layout.num_bytes for layout in layouts)
        self._buffers = [aligned_empty((largest,), np.uint8) for _ in range(num_slots)]
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise self._unreadable(0, str(error.strerror)) from error

    def load(self, layer: int, slot: int) -> Params:
        return self._load(layer, self._buffers[slot])

    def load_unread(self, layer: int, slot: int) -> Params:
        return self._layouts[layer].unpack(self._buffers[slot])

    def load_to_stay(self, layer: int) -> Params:
        """A layer outside the window."""
        return self._load(layer, aligned_empty((self._layouts[layer].num_bytes,), np.uint8))

    def close(self) -> None:
        self._file.close()
        self._buffers.clear()

    def _load(self, layer: int, buffer: np.ndarray) -> Params:
        layout, first = self._layouts[layer], self._offsets[layer]
        rest = memoryview(buffer)[: layout.num_bytes]
        while rest:
            offset = first + layout.num_bytes - len(rest)
            try:
                count = os.preadv(self._file.fileno(), [rest], offset)
            except OSError as error:
                raise self._unreadable(layer, str(error.strerror)) from error
            if not count:
                raise self._unreadable(layer, f"the file ends at byte {offset}")
            rest = rest[count:]
        return layout.unpack(buffer)

    def _unreadable(self, layer: int, why: str) -> WeightsError:
        return WeightsError(
            f"layer {layer} cannot be read from {self._path} ({why}); check the disk, delete the "
            "file, and start again to have it written anew."
        )
