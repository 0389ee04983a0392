"""What devices can do, as their makers say: what a mesh's programs are chosen by.

Such a choice must be the same on all hosts and at every start, and is made before anything runs, so
nothing is measured. Only ratios matter to it.
"""

from __future__ import annotations

import jax

from pallas_kernels.collective_matmul import Rates

_HOP_LATENCY_US = 10.0
"""Assumed of every device: what starts a message, beside its bytes."""

_BY_KIND = {
    # Dense bfloat16, HBM3e, NVLink 4 of 900 GB/s in both directions together.
    "NVIDIA H200": Rates(989e12, 4.8e12, 450e9, _HOP_LATENCY_US, both_ways=False),
    "NVIDIA H100": Rates(989e12, 3.35e12, 450e9, _HOP_LATENCY_US, both_ways=False),
    # Google Cloud's pages of each TPU: the interchip bandwidth of a chip over its links.
    "TPU v5 lite": Rates(197e12, 0.82e12, 50e9, _HOP_LATENCY_US, both_ways=True),
    "TPU v5": Rates(459e12, 2.77e12, 100e9, _HOP_LATENCY_US, both_ways=True),
    "TPU v6 lite": Rates(918e12, 1.64e12, 112e9, _HOP_LATENCY_US, both_ways=True),
}
_OTHERS = Rates(1e11, 1e10, 1e10, _HOP_LATENCY_US, both_ways=False)
"""Of CPUs, whose virtual devices send by copying in memory, and of what is not listed: links are
fast beside arithmetic, so that full chunks have their keys travel."""


def device_rates(device: jax.Device) -> Rates:
    """Rates of one device, for choices on a mesh of many like it."""
    kinds = (kind for kind in _BY_KIND if device.device_kind.startswith(kind))
    return _BY_KIND.get(max(kinds, key=len, default=""), _OTHERS)
