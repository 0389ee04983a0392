"""A file of results that is its own journal: what is in it is done, whatever happens next."""

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

from jaxserve.errors import BatchError

SYNC_S = 2.0
"""Results are on the disk after so long and a step; of a process that is killed, all that it wrote
are."""

_ID = re.compile(r"batch_req_([1-9][0-9]*)")


class Result(NamedTuple):
    """A line of the output: the input's line number, its content, and how it is written."""

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
        """None for what is no whole line of a result. Raises BatchError for a line with the id of
        one that does not say what came of its request."""
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
                "usage; remove that line to have its request done again."
            )
        return cls(int(number[1]), content, text)


def _is_sound(content: dict[str, Any]) -> bool:
    """Whether a result has what is counted of it. Raises KeyError or TypeError if it has not."""
    error = content["error"]
    if error is not None:
        return isinstance(error["code"], str) and isinstance(error["message"], str)
    usage = content["response"]["body"]["usage"]
    return all(type(usage[name]) is int for name in ("prompt_tokens", "completion_tokens"))


class Journal:
    """A file to which results are appended by one process at a time."""

    def __init__(self, path: Path, wait: bool = False) -> None:
        """Opens a file, makes it if need be, and locks it; `wait`s for another process to end.

        Raises BatchError when it cannot be written, or another process writes to it.
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
        """What is in the file, and what a process that was killed left unfinished at its end is
        cut off. Raises BatchError where the file is damaged before its end."""
        good_bytes = 0
        for result in _scan(self.path):
            good_bytes += len(result.text)
            yield result
        if good_bytes < self._size:
            self._cut(good_bytes)

    def append(self, results: Sequence[Result]) -> None:
        """Write whole lines at once. They survive this process from now on, and the machine's
        failure from the next sync on.

        Raises BatchError, with the file as it was, when there is no room.
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
                f"{self.path} cannot be written any more: {error.strerror}. What is in it is safe; "
                "make room and run the same command again."
            ) from error
        self._size += len(text)
        if self._unsynced_since is None:
            self._unsynced_since = time.monotonic()

    def sync_if_due(self) -> None:
        """`sync` when something was appended two seconds ago or earlier. Raises BatchError."""
        since = self._unsynced_since
        if since is not None and time.monotonic() - since >= SYNC_S:
            self.sync()

    def sync(self) -> None:
        """Have everything on the disk. Raises BatchError."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise BatchError(f"{self.path} cannot be written: {error.strerror}.") from error
        self._unsynced_since = None

    def close(self) -> None:
        """Give up the lock. May be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _cut(self, size: int) -> None:
        os.ftruncate(self._file, size)
        self._size = size


def lock(file: int, path: Path, wait: bool = True) -> None:
    """Lock an open file, whose `path` errors name; `wait`s for another process to unlock it.

    Raises BatchError when it cannot be locked, or another process has locked it.
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
            "has locks (flock)."
        ) from error


def read_results(path: Path) -> Iterator[Result]:
    """What is in a file that another process may be writing; nothing where there is none."""
    with contextlib.suppress(FileNotFoundError):
        yield from _scan(path)


def in_use(path: Path) -> bool:
    """Whether a process writes to a file now."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _scan(path: Path) -> Iterator[Result]:
    """Results up to the first line that is none. Raises BatchError for one after that,
    and for a line that is of a result but has another shape."""
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
                    "to have its request done again."
                )
            else:
                yield result
