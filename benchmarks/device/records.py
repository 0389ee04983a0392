"""What was found so far, one JSON object a line, so that a crash loses nothing.

Every record has `part`, `key` and `status`. That is "begun", and later one of: "done"; "wrong", a
result that is not right; "failed", with a traceback; "crashed", with its process; "refused", by the
kernel; "absent", what is not installed; "skipped", for lack of time; "compiled" or "lowered", of a
dry run. `fingerprint` says of which sources and compilers it is (`self_check.fingerprint`), and
`classes` which kernels' classes of shapes it asked for. What else there is depends on the part.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Records:
    """A file of records, which several processes may append to."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, part: str, key: str, status: str, **more: Any) -> None:
        line = json.dumps({"part": part, "key": key, "status": status, **more}) + "\n"
        with self._path.open("ab", buffering=0) as file:
            file.write(line.encode())  # at once, so that lines stay whole

    def read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        return [json.loads(line) for line in self._path.read_text().splitlines()]

    def ended(self, part: str, fingerprint: str) -> set[str]:
        """Keys of a part that came to an end, of the same sources and compilers: not what there was
        no time for, nor what was cut off together with its call."""
        last = {
            record["key"]: record["status"]
            for record in self.of(part)
            if record.get("fingerprint") == fingerprint
        }
        return {key for key, status in last.items() if status not in ("begun", "skipped")}

    def of(self, part: str) -> list[dict[str, Any]]:
        """The records of a part, in order."""
        return [record for record in self.read() if record["part"] == part]
