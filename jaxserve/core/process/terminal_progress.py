"""Progress of startup, training and other long work, on stderr: stdout holds only the output."""

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

from jaxserve.core.process.progress_bar import DRAW_S, NotebookText, in_notebook

_WIDTH = 40
_LABELS = {
    "weights": "Loading weights",
    "draft model": "Loading draft model",
    "programs": "Preparing programs",
    "requests": "Serving requests",
    "steps": "Measuring steps",
    "prompts": "Writing prompts",
    "targets": "Answering prompts",
    "training": "Training",
}


class TerminalProgress:
    """Draws a bar for each part of startup on a terminal or in a notebook, else prints a line per
    part.

    Thread-safe. Out-of-order reports never move a bar back. On a terminal the bars are removed when
    the `with` block ends.

    Attributes:
        draws: whether stderr is a terminal, or this is a notebook.
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
        self._notebook = _NotebookBars() if in_notebook() else None
        self.draws = self._notebook is not None or self._bars.console.is_terminal

    def __call__(self, part: str, done: int, total: int) -> None:
        """See `jaxserve.runtime.startup.start.StartupProgress`."""
        with self._lock:
            before = self._done.get(part, -1)
            if done <= before:
                return
            self._done[part] = done
            label = _LABELS.get(part, part)
            if self._notebook is not None:
                self._notebook.draw(label, done / total)
            elif self.draws:
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


class _NotebookBars:
    """A line of text for each part, drawn every 0.2 s at most and whenever a part is done."""

    def __init__(self) -> None:
        self._text = NotebookText()
        self._begin_s: dict[str, float] = {}
        self._lines: dict[str, str] = {}
        self._next_s = 0.0

    def draw(self, label: str, share: float) -> None:
        """`share` is from 0 to 1."""
        now_s = time.monotonic()
        elapsed_s = now_s - self._begin_s.setdefault(label, now_s)
        bar = "━" * round(_WIDTH * share)
        self._lines[label] = f"{label:<18} {bar:·<{_WIDTH}} {share:4.0%} {elapsed_s:6.1f} s"
        if share >= 1 or now_s >= self._next_s:
            self._text.show("\n".join(self._lines.values()))
            self._next_s = now_s + DRAW_S
