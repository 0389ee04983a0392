"""Runs on several virtual CPU devices, for counts and bytes, not for speed."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

import jax

T = TypeVar("T")

# Cores that are few and busy keep some devices waiting for others, which XLA takes for a deadlock.
_PATIENCE = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=3600"
)


def make_devices(count: int) -> None:
    """Gives this process as many CPU devices; it must not have used any yet."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_PATIENCE}"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def on_devices(count: int, work: Callable[..., T], *arguments: object) -> T:
    """`work(*arguments)` in a process of its own, as an engine takes all devices of a process."""
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawned, make_devices, (count,)) as pool:
        return pool.submit(work, *arguments).result()
