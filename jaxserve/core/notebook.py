"""Text in a notebook's output that changes in place. It needs no widgets."""

from __future__ import annotations

import sys
from typing import Any


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, such as Jupyter's or Colab's."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return hasattr(shell, "kernel")


class NotebookText:
    """One output of the cell that shows it first. Only for use in a notebook."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Replace what is shown."""
        from IPython.display import display

        if self._handle is None:
            self._handle = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._handle.update({"text/plain": text}, raw=True)
