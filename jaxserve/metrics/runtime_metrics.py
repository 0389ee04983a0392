"""Metrics of what a runner counts other than its steps: offloaded weights and KV, experts."""

from __future__ import annotations

from collections.abc import Mapping

from jaxserve.core.steps.counters import (
    ExpertLoads,
    HostKVCopies,
    RecallCounts,
    RuntimeCounters,
    SparseReads,
    WeightReads,
)
from jaxserve.metrics.metric import Metric


def runtime_metrics(counters: RuntimeCounters) -> dict[str, Metric]:
    """Metrics by exported name, of what there is."""
    return (
        _of_weights(counters.weight_reads)
        | _of_host_kv(counters.host_kv_copies)
        | _of_recall(counters.recall_counts)
        | _of_sparse_reads(counters.sparse_reads)
        | _of_experts(counters.expert_loads)
    )


def _of_weights(reads: WeightReads | None) -> dict[str, Metric]:
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


def _of_host_kv(copies: HostKVCopies | None) -> dict[str, Metric]:
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


def _of_recall(counts: RecallCounts | None) -> dict[str, Metric]:
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


def _of_sparse_reads(reads: SparseReads | None) -> dict[str, Metric]:
    if reads is None:
        return {}
    counters = {
        "kv_sparse_tokens_total": ("Tokens on the host that decodes chose from", reads.tokens),
        "kv_sparse_attended_tokens_total": ("Of these, attended to", reads.attended),
    }
    return _counters(counters)


def _of_experts(loads: ExpertLoads | None) -> dict[str, Metric]:
    if loads is None:
        return {}
    by_expert = {str(expert): count for expert, count in enumerate(loads.by_expert)}
    return {
        "jaxserve:expert_tokens_total": Metric(
            "counter", "Tokens that took an expert, over all layers", by_expert, label="expert"
        ),
        "jaxserve:expert_balancedness": Metric(
            "gauge",
            "Tokens of an average expert by those of the most loaded one, the mean over layers",
            loads.balancedness,
        ),
    }


def _counters(told: Mapping[str, tuple[str, float]]) -> dict[str, Metric]:
    return {f"jaxserve:{name}": Metric("counter", *each) for name, each in told.items()}
