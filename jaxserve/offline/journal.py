"""An append-only file of results that is also the journal of completed lines."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from jaxserve.core.errors import BatchError
from jaxserve.protocol.usage import num_tokens

SYNC_S = 2.0
"""Interval of syncs to disk, checked after each step. A killed process loses nothing it wrote."""

_ID = re.compile(r"batch_req_([1-9][0-9]*)")


class Result(NamedTuple):
    """A line of the output: the input's line number, the content, and its serialized form."""

    number: int
    content: dict[str, Any]
    text: bytes

    @classmethod
    def of(cls, number: int, **content: Any) -> Self:
        content = {"id": f"batch_req_{number}"} | content
        text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        return cls(number, content, text)

    @classmethod
    def parse(cls, text: bytes) -> Self | None:
        """Parse a line; None if it is not a complete result. Raises BatchError for a line with the
        id of a result but without a valid error or response."""
        if not text.endswith(b"\n"):
            return None
        try:
            content = json.loads(text)
            number = _ID.fullmatch(content["id"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if number is None:
            return None
        try:
            sound = _is_sound(content)
        except (KeyError, TypeError):
            sound = False
        if not sound:
            raise BatchError(
                f"{content['id']} has neither an error with code and message, nor a response with "
                "usage; remove that line to run its request again."
            )
        return cls(int(number[1]), content, text)


def _is_sound(content: dict[str, Any]) -> bool:
    """Whether a result has the fields that totals count. May raise KeyError or TypeError if not."""
    error = content["error"]
    if error is not None:
        return isinstance(error["code"], str) and isinstance(error["message"], str)
    return all(type(count) is int for count in num_tokens(content["response"]["body"]["usage"]))


class BatchJournal:
    """A file of results with a single writer."""

    def __init__(self, path: Path, wait: bool = False) -> None:
        """Open and lock the file, creating it if needed; with `wait`, wait for the lock.

        Raises BatchError if it cannot be written, or if another process holds the lock.
        """
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise BatchError(
                f"{path} cannot be written: {error.strerror}. Give a file in a directory that "
                "exists and that you can write to."
            ) from error
        try:
            lock(self._file, path, wait)
        except BatchError:
            self.close()
            raise
        self._size = os.fstat(self._file).st_size
        self._unsynced_since: float | None = None

    def results(self) -> Iterator[Result]:
        """The results in the file. Truncates an incomplete line at its end, left by a killed
        process. Raises BatchError if the file is damaged before its end."""
        good_bytes = 0
        for result in _scan(self.path):
            good_bytes += len(result.text)
            yield result
        if good_bytes < self._size:
            self._cut(good_bytes)

    def append(self, results: Sequence[Result]) -> None:
        """Append whole lines in one write. They survive a process crash from now on, and a machine
        crash from the next sync on.

        Raises BatchError, and restores the file, if the disk is full.
        """
        text = b"".join(result.text for result in results)
        written = 0
        try:
            while written < len(text):
                written += os.write(self._file, text[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                self._cut(self._size)
            raise BatchError(
                f"{self.path} can no longer be written: {error.strerror}. Its results are safe; "
                "make room and run the same command again."
            ) from error
        self._size += len(text)
        if self._unsynced_since is None:
            self._unsynced_since = time.monotonic()

    def sync_if_due(self) -> None:
        """Call `sync` if anything was appended two seconds ago or earlier. Raises BatchError."""
        since = self._unsynced_since
        if since is not None and time.monotonic() - since >= SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Sync all results to disk. Raises BatchError."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise BatchError(f"{self.path} cannot be written: {error.strerror}.") from error
        self._unsynced_since = None

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _cut(self, size: int) -> None:
        os.ftruncate(self._file, size)
        self._size = size


def lock(file: int, path: Path, wait: bool = True) -> None:
    """Lock an open file; `path` is for error messages. With `wait`, wait for the lock.

    Raises BatchError if it cannot be locked, or if another process holds the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError as error:
        raise BatchError(
            f"another process is writing to {path}; wait for it, or give another output."
        ) from error
    except OSError as error:
        raise BatchError(
            f"{path} cannot be locked: {error.strerror}. Give an output on a file system that "
            "supports locks (flock)."
        ) from error


def read_results(path: Path) -> Iterator[Result]:
    """Results of a file that another process may be writing; none if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        yield from _scan(path)


def in_use(path: Path) -> bool:
    """Whether another process holds the lock of a file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _scan(path: Path) -> Iterator[Result]:
    """Results up to the first line that is not one. Raises BatchError for a result after that line,
    and for a malformed result."""
    damaged = None
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            try:
                result = Result.parse(text)
            except BatchError as error:
                raise BatchError(f"line {number} of {path}: {error}") from None
            if result is None:
                damaged = damaged or number
            elif damaged:
                raise BatchError(
                    f"line {damaged} of {path} is damaged, and results follow; remove that line "
                    "to run its request again."
                )
            else:
                yield result
