"""Scripts in a process of their own, for what would end or disturb that of the tests."""

from __future__ import annotations

import functools
import gc
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
    """Runs indented Python code, with what the tests can import; fails with the end of stderr."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def on_eight_devices(check: Callable[..., Any]) -> Callable[..., None]:
    """A test that runs `check` as `run_on_eight_devices` does."""

    @functools.wraps(check)
    def test(**arguments: Any) -> None:
        run_on_eight_devices(_run_wrapped, check.__module__, check.__name__, arguments)

    return test


def _run_wrapped(module: str, check: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), check).__wrapped__(**arguments)


def run_on_eight_devices(
    function: Callable[..., Any], *arguments: Any, xla_flags: str | None = None, **named: Any
) -> None:
    """Runs a module's function in another process, which has eight CPU devices and `xla_flags`,
    by default those of this process. Functions share a process, which starts and traces once."""
    try:
        _eight_devices(xla_flags).submit(_run, function, arguments, named).result()
    except BrokenExecutor:
        del _executors[xla_flags]
        raise


_executors: dict[str | None, ProcessPoolExecutor] = {}
"""At most one, by its flags: an idle process still has the memory of the models it ran."""


def _eight_devices(xla_flags: str | None) -> ProcessPoolExecutor:
    if xla_flags not in _executors:
        while _executors:
            _executors.popitem()[1].shutdown()
        # A process is replaced before its programs have more memory mapped than Linux allows.
        _executors[xla_flags] = ProcessPoolExecutor(
            1,
            multiprocessing.get_context("spawn"),
            initializer=_start,
            initargs=(xla_flags,),
            max_tasks_per_child=20,
        )
    return _executors[xla_flags]


def _start(xla_flags: str | None) -> None:
    if xla_flags is not None:
        os.environ["XLA_FLAGS"] = xla_flags
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)


def _run(function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    try:
        function(*arguments, **named)
    finally:
        gc.collect()
