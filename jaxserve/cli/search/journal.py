"""The file of a search: a line for what it searches, and one for each deployment that is done."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from jaxserve.core.errors import ConfigError
from jaxserve.simulator.deployments.search import Outcome

_FORMAT = 1


class Journal:
    """Outcomes of deployments, written as they are found. Of a search that was stopped, those
    already written are `known`.

    With no path nothing is written.
    """

    def __init__(
        self, path: Path | None, searched: Mapping[str, Any], deployments: Sequence[Mapping]
    ) -> None:
        """`searched` is everything that outcomes depend on, besides the `deployments`.

        Raises ConfigError for a file of another search, or one that is none.
        """
        self.known: dict[int, Outcome] = {}
        self._deployments = deployments
        self._file: IO[bytes] | None = None
        if path is None:
            return
        everything = json.dumps([_FORMAT, searched, deployments], default=str, sort_keys=True)
        heading = {"search": hashlib.sha256(everything.encode()).hexdigest()}
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()  # The process was ended while it wrote this.
        if lines:
            self._read(path, heading, lines)
        self._file = path.open("r+b" if path.exists() else "w+b")
        self._file.truncate(sum(map(len, lines)))
        self._file.seek(0, 2)
        if not lines:
            self._write(heading)

    def add(self, number: int, outcome: Outcome) -> None:
        """Writes the outcome of a deployment, unless it is there already."""
        if self._file is not None and number not in self.known:
            self._write({"number": number} | dataclasses.asdict(outcome))

    def close(self) -> None:
        """Idempotent."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _write(self, content: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(content).encode() + b"\n")
        self._file.flush()

    def _read(self, path: Path, heading: Mapping[str, Any], lines: Sequence[bytes]) -> None:
        try:
            first, *rows = map(json.loads, lines)
            if "search" not in first:
                raise ValueError("its first line names no search")
            if first == heading:
                for row in rows:
                    number = range(len(self._deployments))[row.pop("number")]
                    values = row.pop("values")
                    self.known[number] = Outcome(**row, values=values and tuple(values))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise ConfigError(
                f"out is {str(path)!r}, which is not the file of a search: {error}; give another."
            ) from None
        if first != heading:
            raise ConfigError(
                f"out is {str(path)!r}, which has a search of another space, load, SLO, prices or "
                "version of jaxserve; give another file, or remove that one."
            )
