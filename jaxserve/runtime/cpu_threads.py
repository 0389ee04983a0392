"""Threads for several CPU devices in one process.

XLA runs all CPU devices of a process in one pool, of as many threads as there are cores or devices.
A device that waits in a collective blocks its thread, and so does the launch of its next program
when as many as it may have are in flight. A device that multiplies large matrices shares the
product out to other threads and waits for them. With no more than two threads for each device, none
may be left to compute: XLA aborts the process after 40 seconds.
"""

from __future__ import annotations

import os
import re

import jax

_VARIABLES = ("PJRT_NPROC", "NPROC")
"""What XLA reads the size of its pool from, the first one first, when it makes its CPU devices."""
_FLAG = re.compile(r"--?xla_force_host_platform_device_count=(\d+)")


def make_room_for_collectives() -> None:
    """Have XLA's pool hold a thread for each core beyond two for each virtual CPU device.

    Must come before the first array or `jax.devices()`; later it has no effect. A size that is set
    in the environment is left alone.
    """
    devices = jax.config.jax_num_cpu_devices
    if devices < 1:  # Not set.
        given = _FLAG.findall(os.environ.get("XLA_FLAGS", ""))
        devices = int(given[-1]) if given else 1
    if devices > 1 and not any(name in os.environ for name in _VARIABLES):
        os.environ[_VARIABLES[0]] = str((os.cpu_count() or 1) + 2 * devices)
