"""Measures how fast a machine copies what may be offloaded."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

_BYTES = 32 << 20
"""Of each copy that is timed: larger than caches."""
_REPEATS = 3


class LinkRates(NamedTuple):
    """Bytes a second of copies; without limit where nothing has to be copied."""

    host_to_device: float
    device_to_host: float
    host_to_disk: float


def measure(device: jax.Device, directory: Path) -> LinkRates:
    """Rates of `device`, unless its memory is the host's, and of writes to a directory. Takes a
    second or two."""
    host = np.ones(_BYTES, np.uint8)
    copies = (math.inf, math.inf) if device.platform == "cpu" else copy_rates(device)
    return LinkRates(*copies, _BYTES / median_seconds(lambda: _write(directory, host)))


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
