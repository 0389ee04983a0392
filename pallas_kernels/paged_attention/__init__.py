"""Ragged attention over paged keys and values (PagedAttention, 2309.06180)."""

from pallas_kernels.paged_attention.api import (
    KVPages,
    PageLayout,
    RaggedBatch,
    paged_attention,
    write_kv,
)

__all__ = ["KVPages", "PageLayout", "RaggedBatch", "paged_attention", "write_kv"]
