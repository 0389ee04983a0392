"""Scripts in a process of their own, for what would end or disturb that of the tests."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from typing import Any

import jax


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
    """A test that runs `check` in another process, which has eight CPU devices. All such checks of
    a test process run in one, which starts and compiles once."""

    @functools.wraps(check)
    def test(**arguments: Any) -> None:
        running = _eight_devices().submit(_run, check.__module__, check.__name__, arguments)
        try:
            running.result()
        except BrokenExecutor:
            _eight_devices.cache_clear()
            raise

    return test


@functools.cache
def _eight_devices() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _start)


def _start() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


def _run(module: str, check: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), check).__wrapped__(**arguments)
