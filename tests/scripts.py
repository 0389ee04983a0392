"""Scripts in a process of their own, for what would end or disturb that of the tests."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def run_script(script: str, timeout_s: int) -> None:
    """Runs indented Python code, with what the tests can import; fails with its last words."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-3000:]
