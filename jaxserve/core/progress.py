"""Progress bars, on stderr, so that stdout holds only the output."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_DRAW_S = 0.2

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


class ProgressBar:
    """One bar on stderr, if that is a terminal or a notebook; otherwise nothing is printed.

    It is drawn by the thread that calls `update`, every 0.2 s at most, and starts no thread.

    Attributes:
        draws: whether anything is printed.
    """

    def __init__(
        self,
        label: str,
        total: int | None,
        *columns: ProgressColumn,
        show: bool = True,
        transient: bool = False,
        **fields: Any,
    ) -> None:
        """`columns` follow the bar: by default the number done and the times. `fields` are what
        they show besides. The bar is removed at the end if `transient`."""
        console = Console(stderr=True)
        self.draws = show and (console.is_terminal or console.is_jupyter)
        # Notebooks get text, as terminals do: rich's widgets would need ipywidgets.
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            *(columns or (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())),
            console=Console(stderr=True, force_jupyter=False, force_terminal=self.draws),
            transient=transient,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not self.draws,
        )
        self._task = self._bars.add_task(label, total=total, **fields)
        self._bars.start()
        self._next_s = 0.0

    def update(self, done: int, **fields: Any) -> None:
        """Set how much is done, and other fields (also `total`)."""
        if self.draws:
            now = time.monotonic()
            due = now >= self._next_s
            self._bars.update(self._task, completed=done, refresh=due, **fields)
            if due:
                self._next_s = now + _DRAW_S

    def close(self) -> None:
        """Draw the last state. Idempotent."""
        self._bars.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()
