"""Progress of a batch job, on stderr: a bar, or periodic lines if stderr is not a terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

if TYPE_CHECKING:
    from jaxserve.offline.run import BatchRun

_DRAW_S = 0.2
_LINE_S = 30.0


class BatchProgress:
    """Called with the run after each step. The bar counts this host's share of the remaining lines,
    and is removed when the `with` block ends."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("Answering"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rest]}"),
            console=Console(stderr=True),
            transient=True,
            auto_refresh=False,
        )
        self._draws = self._bar.console.is_terminal
        self._task = self._bar.add_task("", rest="")
        self._next = time.monotonic() + (0.0 if self._draws else _LINE_S)

    def __call__(self, run: BatchRun) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        done, total, rest = run.done, run.num_left, _rest(run)
        if self._draws:
            self._bar.update(self._task, completed=done, total=total, rest=rest, refresh=True)
            self._next = now + _DRAW_S
        else:
            print(f"{done:,}/{total:,} lines, {rest}", file=sys.stderr)
            self._next = now + _LINE_S

    def __enter__(self) -> Self:
        if self._draws:
            self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._draws:
            self._bar.stop()


def _rest(run: BatchRun) -> str:
    from jaxserve.offline.timeline import duration

    parts = [f"{run.timeline.tokens_per_s:,.0f} tokens/s"]
    if run.totals.errors:
        parts.insert(0, f"{run.totals.num_errors:,} errors")
    if run.left_s is not None:
        parts.append(f"{duration(run.left_s)} left")
    return ", ".join(parts)
