"""Thread pool size for several CPU devices in one process.

XLA runs all CPU devices of a process in one pool, of as many threads as there are cores or devices.
A device that waits in a collective blocks its thread, and so does launching its next program when
its limit of programs in flight is reached. A device that multiplies large matrices splits the
product over other threads and waits for them. With at most two threads per device, all may block:
XLA aborts the process after 40 seconds.
"""

from __future__ import annotations

import os
import re

import jax

_VARIABLES = ("PJRT_NPROC", "NPROC")
"""Variables from which XLA reads its pool size, in this order, when it creates CPU devices."""
_FLAG = re.compile(r"--?xla_force_host_platform_device_count=(\d+)")


def make_room_for_collectives() -> None:
    """Size XLA's pool to one thread per core plus two per virtual CPU device.

    Call it before the first array or `jax.devices()`; later it has no effect. A size set in the
    environment is kept.
    """
    devices = jax.config.jax_num_cpu_devices
    if devices < 1:  # Not set.
        given = _FLAG.findall(os.environ.get("XLA_FLAGS", ""))
        devices = int(given[-1]) if given else 1
    if devices > 1 and not any(name in os.environ for name in _VARIABLES):
        os.environ[_VARIABLES[0]] = str((os.cpu_count() or 1) + 2 * devices)
