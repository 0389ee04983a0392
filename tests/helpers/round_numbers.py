"""A device and a step's work in round numbers, whose times can be computed by hand."""

from __future__ import annotations

from jaxserve.core.devices import DeviceSpec
from jaxserve.core.steps.work import StepWork

DEVICE = DeviceSpec(
    name="round numbers",
    kind="none",
    platform="gpu",
    source="by hand",
    memory_bytes=1 << 40,
    memory_bytes_per_s=1e9,
    flops={"bfloat16": 1e12},
    link_bytes_per_s=1e8,
    hop_latency_s=1e-3,
    launch_s=1e-5,
    compute_efficiency=1.0,
    memory_efficiency=1.0,
    link_efficiency=1.0,
)
WORK = StepWork(
    dtype="bfloat16",
    itemsize=2,
    hidden_size=1000,
    windows={None: 10},
    layer_weights=10_000_000,
    layer_bytes=20_000_000,
    head_weights=1_000_000,
    head_bytes=2_000_000,
    query_size=1000,
    kv_bytes=1000,
)
