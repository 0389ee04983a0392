"""Startup progress, on stderr, so that stdout holds only the output."""

from __future__ import annotations

import sys
import threading
import time
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

_LABELS = {
    "weights": "Loading weights",
    "programs": "Preparing programs",
    "requests": "Serving requests",
}


class TerminalProgress:
    """Draws a bar for each part of startup, or prints a line per part if stderr is not a terminal.

    Thread-safe. Out-of-order reports never move a bar back. The bars are removed when the `with`
    block ends.

    Attributes:
        draws: whether stderr is a terminal.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begin = time.monotonic()
        self._done: dict[str, int] = {}
        self._tasks: dict[str, TaskID] = {}
        self._bars = Progress(
            TextColumn("{task.description:<18}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self.draws = self._bars.console.is_terminal

    def __call__(self, part: str, done: int, total: int) -> None:
        """See `jaxserve.runtime.startup.Progress`."""
        with self._lock:
            before = self._done.get(part, -1)
            if done <= before:
                return
            self._done[part] = done
            label = _LABELS.get(part, part)
            if self.draws:
                self._draw(part, label, done, total)
            elif done == total:
                elapsed = time.monotonic() - self._begin
                print(f"{label}: done after {elapsed:.1f} s", file=sys.stderr)

    def _draw(self, part: str, label: str, done: int, total: int) -> None:
        if part not in self._tasks:
            self._bars.start()
            self._tasks[part] = self._bars.add_task(label, total=total)
        self._bars.update(self._tasks[part], completed=done)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        if self.draws:
            self._bars.stop()
