"""Random access to the lines of a batch input: JSONL, Parquet or ArrayRecord."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from jaxserve.core.errors import BatchError, RequestError
from jaxserve.core.process.extras import extra

MAX_LINE_BYTES = 8 << 20
"""Maximum size of a line or record, that of a request's body in the server by default."""

_READ_BYTES = 1 << 20

LineFields = Mapping[str, Any]


class Lines(Protocol):
    """Records by index: a Grain random access data source. Only their offsets are held in memory.

    `digest` is a hash of the file's bytes.
    """

    digest: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> LineFields:
        """Raises RequestError for a line that is not a JSON object, or is too long."""

    def number(self, index: int) -> int:
        """The line's number in the file, from 1; blank lines count."""


def open_lines(path: Path) -> Lines:
    """The lines of a file, whose format is given by its suffix.

    Raises BatchError if it cannot be read, has an unknown format, or has no lines.
    """
    kind = _KINDS.get(path.suffix)
    if kind is None:
        raise BatchError(
            f"the input is {str(path)!r}; its name must end in one of {', '.join(_KINDS)}."
        )
    if not path.is_file():
        raise BatchError(f"the input {str(path)!r} does not exist or is not a file.")
    try:
        lines = kind(path)
    except OSError as error:
        raise BatchError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RuntimeError) as error:  # pyarrow's and array_record's
        raise BatchError(f"{path} does not have the format of its suffix: {error}") from error
    if not len(lines):
        raise BatchError(f"{path} has no lines.")
    return lines


class JsonLines:
    """A file with a JSON object on each line. Blank lines are skipped."""

    def __init__(self, path: Path) -> None:
        digest = hashlib.blake2b(digest_size=16)
        self._starts, self._ends, self._numbers = array("q"), array("q"), array("q")
        number, end, begins = 0, 0, True
        with path.open("rb") as file:
            while part := file.readline(_READ_BYTES):  # A line may be longer than the memory.
                digest.update(part)
                if begins:
                    number, start, blank = number + 1, end, True
                end += len(part)
                begins = part.endswith(b"\n")
                if blank and not part.isspace():
                    blank = False
                    self._starts.append(start)
                    self._ends.append(end)
                    self._numbers.append(number)
                elif not blank:
                    self._ends[-1] = end
        self.digest = digest.hexdigest()
        self._file = path.open("rb")

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> LineFields:
        start, end = self._starts[index], self._ends[index]
        _check_size(end - start)
        return _record(os.pread(self._file.fileno(), end - start, start))

    def number(self, index: int) -> int:
        return self._numbers[index]


class ParquetRows:
    """A Parquet file with a column for each key. Nulls count as absent; a column `body` may hold
    JSON as text. The last row group read is held in memory."""

    def __init__(self, path: Path) -> None:
        with extra("parquet"):
            from pyarrow.parquet import ParquetFile

        self.digest = _digest(path)
        self._file = ParquetFile(path)
        groups = range(self._file.num_row_groups)
        sizes = (self._file.metadata.row_group(group).num_rows for group in groups)
        self._ends = list(accumulate(sizes))
        self._group = -1

    def __len__(self) -> int:
        return self._file.metadata.num_rows

    def __getitem__(self, index: int) -> LineFields:
        group = bisect_right(self._ends, index)
        if group != self._group:
            self._rows, self._group = self._file.read_row_group(group), group
        place = index - self._ends[group] + len(self._rows)
        (row,) = self._rows.slice(place, 1).to_pylist()
        record = _without_nulls(row)
        if isinstance(record.get("body"), str):
            record["body"] = _record(record["body"].encode())
        return record

    def number(self, index: int) -> int:
        return index + 1


class ArrayRecords:
    """An ArrayRecord file whose records are JSON objects."""

    def __init__(self, path: Path) -> None:
        from grain.sources import ArrayRecordDataSource  # imports JAX, which takes a second

        self.digest = _digest(path)
        self._source = ArrayRecordDataSource(str(path))

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> LineFields:
        return _record(self._source[index])

    def number(self, index: int) -> int:
        return index + 1


_KINDS = {
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".parquet": ParquetRows,
    ".array_record": ArrayRecords,
    ".arrayrecord": ArrayRecords,
}


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_LINE_BYTES:
        raise RequestError(
            f"the line has {num_bytes} bytes; at most {MAX_LINE_BYTES} are allowed. Split it."
        )


def _record(text: bytes) -> dict[str, Any]:
    _check_size(len(text))
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(f"not JSON: {error.msg} at character {error.pos + 1}.") from None
    except (ValueError, RecursionError) as error:  # invalid UTF-8, numbers too long
        raise RequestError(f"not JSON: {error}.") from None
    if not isinstance(record, dict):
        shown = text[:60].decode(errors="replace")
        raise RequestError(f"a line must be a JSON object, got {shown!r}.")
    return record


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
