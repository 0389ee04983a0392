"""Progress bars under a pseudo-terminal, in a pipe, and in a notebook."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import threading

import pytest

from jaxserve.core.process.progress_bar import ProgressBar

SCRIPT = """
import sys
from types import SimpleNamespace as Fake
from jaxserve.core.process.progress_bar import ProgressBar
if len(sys.argv) > 1:
    sys.modules["IPython"] = Fake(get_ipython=lambda: Fake(kernel=True))
with ProgressBar("Answering", 1000) as bar:
    for done in range(1001):
        bar.update(done)
"""


def shown_on_a_terminal() -> str:
    primary, secondary = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stderr=secondary, env=environment):
        os.close(secondary)
        shown = b""
        with contextlib.suppress(OSError):  # Linux tells the end of a terminal by EIO.
            while piece := os.read(primary, 1 << 16):
                shown += piece
    os.close(primary)
    return shown.decode()


def test_a_terminal_shows_the_first_and_the_last_state_and_few_between():
    shown = shown_on_a_terminal()
    assert "0/1000" in shown and "1000/1000" in shown
    assert 2 <= shown.count("Answering") < 20


@pytest.mark.parametrize("notebook", [False, True])
def test_a_pipe_shows_nothing_and_a_notebook_text(notebook):
    run = [sys.executable, "-c", SCRIPT, *["notebook"] * notebook]
    stderr = subprocess.run(run, capture_output=True, text=True, check=True).stderr
    assert ("1000/1000" in stderr) == notebook
    assert bool(stderr) == notebook


def test_no_bar_starts_a_thread(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any stream for a terminal then.
    before = set(threading.enumerate())
    with ProgressBar("Answering", 2) as bar:
        assert bar.draws
        bar.update(1)
        assert set(threading.enumerate()) == before
    hidden = ProgressBar("Answering", 2, show=False)
    assert not hidden.draws
