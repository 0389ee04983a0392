"""Progress of a batch job, on stderr: a bar, or periodic lines if stderr is not a terminal."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self

from rich.progress import MofNCompleteColumn, TextColumn

from jaxserve.core.process.progress_bar import ProgressBar

if TYPE_CHECKING:
    from jaxserve.offline.run import BatchRun

_LINE_S = 30.0


class BatchProgress:
    """Called with the run after each step. The bar counts this host's share of the remaining lines,
    and is removed when the `with` block ends."""

    def __init__(self) -> None:
        columns = MofNCompleteColumn(), TextColumn("{task.fields[rest]}")
        self._bar = ProgressBar("Answering", None, *columns, transient=True, rest="")
        self._next_s = time.monotonic() + _LINE_S

    def __call__(self, run: BatchRun) -> None:
        if self._bar.draws:
            self._bar.update(run.done, total=run.num_left, rest=_rest(run))
        elif time.monotonic() >= self._next_s:
            print(f"{run.done:,}/{run.num_left:,} lines, {_rest(run)}", file=sys.stderr)
            self._next_s = time.monotonic() + _LINE_S

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.close()


def _rest(run: BatchRun) -> str:
    from jaxserve.offline.timeline import duration

    parts = [f"{run.timeline.tokens_per_s:,.0f} tokens/s"]
    if run.totals.errors:
        parts.insert(0, f"{run.totals.num_errors:,} errors")
    if run.left_s is not None:
        parts.append(f"{duration(run.left_s)} left")
    return ", ".join(parts)
