"""Human-readable formats of numbers and runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from jaxserve.metrics.summaries import RunSummary

if TYPE_CHECKING:
    import jax

    from jaxserve.llm import LLM


def size(num_bytes: float) -> str:
    """Bytes in the unit that leaves one to four digits before the point."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def milliseconds(us: float) -> str:
    return f"{us / 1000:,.1f} ms"


def device_name(device: jax.Device) -> str:
    """The device kind, and on CPUs the number of cores this process may use."""
    if device.platform != "cpu":
        return device.device_kind
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{device.device_kind} ({cores} cores)"


def summary(llm: LLM) -> str:
    """One line about all requests so far: tokens, tokens/s after the first ones, median time to
    first token, device, and what streamed weights read."""
    device = device_name(llm.plan().device) + _streamed(llm)
    run = RunSummary.of(llm.engine.metrics.finished())
    if run is None:
        return f"0 tokens, on {device}"
    pace = run.stream_tokens_per_s or run.output_tokens_per_s
    return (
        f"{run.output_tokens} tokens, {pace:.1f} tokens/s, first token after "
        f"{run.ttft_us.p50 / 1e6:.2f} s, on {device}"
    )


def _streamed(llm: LLM) -> str:
    reads = llm.engine.counters.weight_reads
    if reads is None:
        return ""
    return (
        f"; {size(reads.bytes_per_pass)} of weights a pass from {reads.tier}, "
        f"{reads.stall_share:.0%} of the time waiting for them"
    )
