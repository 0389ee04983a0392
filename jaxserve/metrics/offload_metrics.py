"""Metrics of what is not on the devices: streamed weights, and KV on the host."""

from __future__ import annotations

from collections.abc import Mapping

from jaxserve.core.steps.offload_counts import HostKVCopies, RecallCounts, SparseReads, WeightReads
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
    return _counters(counters)


def host_kv_metrics(copies: HostKVCopies | None) -> dict[str, Metric]:
    """Metrics by exported name; none without KV on the host."""
    if copies is None:
        return {}
    counters = {
        "kv_host_page_bytes_total": ("Bytes of pages copied to the device", copies.page_bytes),
        "kv_host_query_bytes_total": (
            "Bytes of queries copied to pages on the host, and of results back",
            copies.query_bytes,
        ),
    }
    return _counters(counters)


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
    return _counters(counters)


def sparse_metrics(reads: SparseReads | None) -> dict[str, Metric]:
    """Metrics by exported name; none without SparF."""
    if reads is None:
        return {}
    counters = {
        "kv_sparse_tokens_total": ("Tokens on the host that decodes chose from", reads.tokens),
        "kv_sparse_attended_tokens_total": ("Of these, attended to", reads.attended),
    }
    return _counters(counters)


def _counters(told: Mapping[str, tuple[str, float]]) -> dict[str, Metric]:
    return {f"jaxserve:{name}": Metric("counter", *each) for name, each in told.items()}
