"""Scripts in a process of their own, for what would end or disturb that of the tests."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any


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


def on_eight_devices(check: Callable[..., Any]) -> Callable[..., None]:
    """A test that runs `check` in a process of its own, which has eight CPU devices."""

    @functools.wraps(check)
    def test(**arguments: Any) -> None:
        run_script(
            f"""
            import jax
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", 8)
            import {check.__module__} as tests
            tests.{check.__name__}.__wrapped__(**{arguments!r})
            """,
            timeout_s=500,
        )

    return test
