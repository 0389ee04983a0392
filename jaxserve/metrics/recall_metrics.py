"""Metrics of compressed KV on the host: chunks of values that decodes attend to, and copies."""

from __future__ import annotations

from jaxserve.core.steps.recall_counts import RecallCounts
from jaxserve.metrics.metric import Metric


def recall_metrics(counts: RecallCounts | None) -> dict[str, Metric]:
    """Metrics by exported name; none without compressed KV."""
    if counts is None:
        return {}
    counters = {
        "kv_recalled_chunks_total": ("Chunks of compressed KV attended to", counts.attended),
        "kv_recall_copied_chunks_total": ("Of these, copied from the host", counts.copied),
        "kv_recall_copied_bytes_total": (
            "Bytes of these copies",
            counts.copied * counts.chunk_bytes,
        ),
    }
    return {f"jaxserve:{name}": Metric("counter", *told) for name, told in counters.items()}
