"""Measures how fast a machine copies what may be offloaded, and what that takes from computing."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.models.loading.assemble import aligned_empty

_BYTES = 32 << 20
"""Of each copy that is timed: larger than caches."""
_REPEATS = 3
_WIDTH = 768


class LinkRates(NamedTuple):
    """Bytes a second of copies, and the seconds of computing that one second of reads takes."""

    host_to_device: float
    device_to_host: float
    host_to_disk: float
    contention: float


def measure(device: jax.Device, file: Path) -> LinkRates:
    """Rates of `device` and of the disk of `file`, which is read while the device computes; the
    writes go to a file beside it. Takes a second or two."""
    host = np.ones(_BYTES, np.uint8)
    return LinkRates(
        *copy_rates(device),
        _BYTES / median_seconds(lambda: _write(file.parent, host)),
        _contention(device, file),
    )


def copy_rates(device: jax.Device) -> tuple[float, float]:
    """Bytes a second of copies from the host to the device, and back."""
    host = np.ones(_BYTES, np.uint8)
    on_device = jax.block_until_ready(jax.device_put(host, device))

    def upload() -> None:
        jax.block_until_ready(jax.device_put(host.copy(), device))

    def download() -> None:
        np.array(jax.block_until_ready(on_device + np.uint8(1)))

    return _BYTES / median_seconds(upload), _BYTES / median_seconds(download)


def median_seconds(work: Callable[[], object]) -> float:
    """The median time of some calls, after one that warms up."""
    times = []
    for _ in range(1 + _REPEATS):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _write(directory: Path, data: np.ndarray) -> None:
    path = directory / f".rate-{os.getpid()}"
    try:
        with path.open("wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
    finally:
        path.unlink(missing_ok=True)


def _contention(device: jax.Device, file: Path) -> float:
    """How much longer products take while a thread reads the file, for each second of reads."""
    matrix = jax.device_put(jnp.ones((_WIDTH, _WIDTH), jnp.float32), device)
    product = jax.jit(lambda x: x @ x * (1 / _WIDTH))
    x = jax.block_until_ready(product(matrix))
    stop, busy_s = threading.Event(), [0.0]

    def compute() -> None:
        y = x
        for _ in range(100):
            y = product(y)
        jax.block_until_ready(y)

    def read() -> None:
        buffer = aligned_empty((min(_BYTES, file.stat().st_size),), np.uint8)
        with file.open("rb", buffering=0) as opened:
            while not stop.is_set():
                begin = time.perf_counter()
                os.preadv(opened.fileno(), [memoryview(buffer)], 0)
                busy_s[0] += time.perf_counter() - begin

    alone_s = median_seconds(compute)
    thread = threading.Thread(target=read, name="jaxserve-rates", daemon=True)
    thread.start()
    try:
        begin = time.perf_counter()
        with_reads_s = median_seconds(compute)
        total_s = time.perf_counter() - begin
    finally:
        stop.set()
        thread.join()
    share = busy_s[0] / total_s  # Of the time of computing, that reads went on.
    if not share:
        return 0.0
    return min(1.0, max(0.0, (with_reads_s - alone_s) / (with_reads_s * share)))
