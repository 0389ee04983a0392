"""Snapshots as a stream of bytes, from one engine to another.

A part is a line with its name and the CRC-32 of all, and the bytes of a file as in a directory:
first the header, then the requests, then KV, and last an end. Parts can be sent as they are made,
and are checked as they come. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from safetensors import SafetensorError

from jaxserve.core.errors import SnapshotError
from jaxserve.engine.snapshot.files import VERSION, RowsMissing, decoded_rows, encoded

_HEADER = "header"
_END = "end"


def encode_parts(facts: dict[str, Any], entries: Iterable[tuple[str, Any]]) -> Iterator[bytes]:
    """The parts of a snapshot of these named entries, JSON or arrays."""
    yield _part(_HEADER, {"version": VERSION, "facts": facts})
    count = 1
    for name, content in entries:
        yield _part(name, content)
        count += 1
    yield _part(_END, count)


def _part(name: str, content: Any) -> bytes:
    name, data = encoded(name, content)
    return b"%s %08x\n%s" % (name.encode(), _checksum(name.encode(), data), data)


def _checksum(name: bytes, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(name))


class PartReader:
    """Reads parts in order, each when it is needed."""

    in_order = True
    """Rows of one array must be read before those of the next; `forget` frees them."""

    def __init__(self, parts: Iterable[bytes]) -> None:
        """Reads the header. Raises SnapshotError when it is newer or damaged."""
        self._parts = iter(parts)
        self._count = 0
        self._arrays: dict[str, np.ndarray] = {}
        self._advance()
        header = self.json(_HEADER)
        try:
            version = header["version"]
            self.facts: dict[str, Any] = dict(header["facts"])
        except (KeyError, TypeError, ValueError) as error:
            raise SnapshotError(f"the exported request has no header ({error!r}).") from error
        if type(version) is not int or version > VERSION:
            raise SnapshotError(
                f"the exported request has format version {version}, but this jaxserve reads up to "
                f"{VERSION}; update the importing engine first."
            )

    def has(self, name: str) -> bool:
        """Whether the next part is JSON of this name."""
        return self._name == f"{name}.json"

    def json(self, name: str) -> Any:
        """The content of the next part. Raises SnapshotError when that is another one."""
        if not self.has(name):
            raise SnapshotError(
                f"the exported request has {self._name} where {name}.json is due; give its parts "
                "in order."
            )
        try:
            content = json.loads(self._data)
        except ValueError as error:
            raise SnapshotError(f"{name} of the exported request is no JSON: {error}.") from error
        self._advance()
        return content

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows start .. stop - 1 of an array. Raises RowsMissing when the parts end before it,
        SnapshotError when one is damaged."""
        while name not in self._arrays:
            stem, _, kind = self._name.partition(".")
            if kind != "safetensors":
                self.finish()
                raise RowsMissing(f"the exported request has no {name}.")
            try:
                self._arrays[stem] = decoded_rows(self._data)
            except (SafetensorError, KeyError) as error:
                raise SnapshotError(f"{self._name} of the exported request: {error}.") from error
            self._advance()
        return self._arrays[name][start:stop]

    def forget(self, name: str) -> None:
        """Frees an array that is not read again."""
        self._arrays.pop(name, None)

    def finish(self) -> None:
        """Checks the parts that were not needed. Raises SnapshotError when one is damaged, or
        missing."""
        while not self.has(_END):
            self._advance()
        count = json.loads(self._data)
        if count != self._count - 1:
            raise SnapshotError(
                f"the exported request has {self._count} parts, but {count} were sent before the "
                "last; import it again."
            )

    def _advance(self) -> None:
        """Takes the next part, unless the last one was the end, and checks it."""
        try:
            part = next(self._parts)
        except StopIteration:
            raise SnapshotError(
                f"the exported request ends after {self._count} parts, without an end; import all "
                "of its parts."
            ) from None
        line, _, data = bytes(part).partition(b"\n")
        name, _, checksum = line.partition(b" ")
        if checksum != b"%08x" % _checksum(name, data):
            raise SnapshotError(
                f"part {self._count} of the exported request is damaged; import it again."
            )
        self._name, self._data = name.decode(errors="replace"), data
        self._count += 1
