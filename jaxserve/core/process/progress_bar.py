"""A progress bar on stderr, so that stdout holds only the output."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

DRAW_S = 0.2
"""Least time between two drawings."""


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
        they show as well. The bar is removed at the end if `transient`."""
        self.draws = show and (Console(stderr=True).is_terminal or in_notebook())
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
                self._next_s = now + DRAW_S

    def close(self) -> None:
        """Draw the last state. Idempotent."""
        self._bars.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class NotebookText:
    """Text in the output of the notebook cell that shows it first, which changes in place. It needs
    no widgets."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Replace what is shown."""
        from IPython.display import display

        if self._handle is None:
            self._handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, such as Jupyter's or Colab's."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return hasattr(shell, "kernel")
