"""Metrics of streamed weights: bytes read, and how long steps waited for them."""

from __future__ import annotations

from jaxserve.core.steps.weight_reads import WeightReads
from jaxserve.metrics.metric import Metric


def weight_metrics(reads: WeightReads | None) -> dict[str, Metric]:
    """Metrics by exported name; none where all weights are on the device."""
    if reads is None:
        return {}
    counters = {
        "weight_read_bytes_total": ("Bytes of streamed weights read", reads.num_bytes),
        "weight_read_seconds_total": ("Time of these reads", reads.read_s),
        "weight_step_seconds_total": ("Time of the layers of steps", reads.step_s),
        "weight_stall_seconds_total": (
            "Time of these that the devices waited for reads",
            reads.stall_s,
        ),
    }
    return {f"jaxserve:{name}": Metric("counter", *told) for name, told in counters.items()}
