"""How much memory devices and the host have, and how much of it is ours."""

from __future__ import annotations

import os

import jax

from jaxserve.runtime.hardware.devices import DescribedDevice
from jaxserve.runtime.hardware.jax_private import devices_are_open

_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Environment variables with the share of a GPU's memory that JAX reserves; either may be set."""
_JAX_FRACTION = 0.75
"""What JAX reserves unless told."""
_UNUSABLE_SHARE = 0.03
_HOST_SHARE = 4
"""By default, lower KV tiers take at most 1 / _HOST_SHARE of the host's free memory."""


def reserve_memory(share: float) -> None:
    """Have JAX reserve so much of each GPU's memory when it first uses one, and a little more, of
    which its allocator cannot use every byte. The caller's own setting takes precedence."""
    if not devices_are_open() and not any(map(os.environ.get, _FRACTIONS)):
        os.environ[_FRACTIONS[0]] = f"{_to_reserve(share):.3f}"


def _to_reserve(share: float) -> float:
    return min(share + _UNUSABLE_SHARE, 1 - _UNUSABLE_SHARE)


def _reserved() -> float:
    """The share of each GPU's memory that JAX has reserved here."""
    return float(next(filter(None, map(os.environ.get, _FRACTIONS)), _JAX_FRACTION))


def usable_memory(device: jax.Device | DescribedDevice, share: float) -> int:
    """Bytes of that share of a device's memory; of a GPU's at most what JAX has reserved, or would
    reserve on one that is described."""
    if device.platform == "gpu":
        described = isinstance(device, DescribedDevice)
        reserved = _to_reserve(share) if described else _reserved()
        share = min(share, reserved * (1 - _UNUSABLE_SHARE))
    return int(device_memory(device) * share)


def device_memory(device: jax.Device | DescribedDevice) -> int:
    """Bytes of a device's memory; on a CPU, those free on the host now."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit and device.platform == "gpu" and not isinstance(device, DescribedDevice):
        return round(limit / _reserved())  # It counts what JAX has reserved.
    return limit or free_on_host(device)


def host_share(device: jax.Device | DescribedDevice) -> int:
    """Bytes that lower KV tiers take of a host by default, at most."""
    return free_on_host(device) // _HOST_SHARE


def free_on_host(device: jax.Device | DescribedDevice) -> int:
    """Bytes of memory on the host of a device."""
    return device.host_memory_bytes if isinstance(device, DescribedDevice) else host_memory()


def host_memory() -> int:
    """Bytes of the host's memory that are free now."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
