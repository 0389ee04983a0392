"""Device rates by vendor specification, used to choose the programs of a mesh.

The choice must be the same on all hosts and at every start, and is made before anything runs, so
nothing is measured. Only ratios matter.
"""

from __future__ import annotations

import jax

from pallas_kernels.collective_matmul import DeviceRates

_HOP_LATENCY_US = 10.0
"""Assumed for every device: fixed latency of a message."""

_BY_KIND = {
    # Dense bfloat16, HBM3e, NVLink 4 of 900 GB/s in both directions together.
    "NVIDIA H200": DeviceRates(989e12, 4.8e12, 450e9, _HOP_LATENCY_US, both_ways=False),
    "NVIDIA H100": DeviceRates(989e12, 3.35e12, 450e9, _HOP_LATENCY_US, both_ways=False),
    # Google Cloud's documentation of each TPU: the interchip bandwidth of a chip over its links.
    "TPU v5 lite": DeviceRates(197e12, 0.82e12, 50e9, _HOP_LATENCY_US, both_ways=True),
    "TPU v5": DeviceRates(459e12, 2.77e12, 100e9, _HOP_LATENCY_US, both_ways=True),
    "TPU v6 lite": DeviceRates(918e12, 1.64e12, 112e9, _HOP_LATENCY_US, both_ways=True),
}
_OTHERS = DeviceRates(1e11, 1e10, 1e10, _HOP_LATENCY_US, both_ways=False)
"""For CPUs, whose virtual devices send by copying in memory, and for unlisted devices: links are
fast relative to arithmetic, so full chunks use ring attention."""


def device_rates(device: jax.Device) -> DeviceRates:
    """Rates of one device, for choices on a mesh of many like it."""
    kinds = (kind for kind in _BY_KIND if device.device_kind.startswith(kind))
    return _BY_KIND.get(max(kinds, key=len, default=""), _OTHERS)
