"""Ragged attention over paged keys and values (PagedAttention, 2309.06180)."""

from pallas_kernels.paged_attention.api import attend, paged_attention, write_kv
from pallas_kernels.paged_attention.layout import KVPages, PageLayout, RaggedBatch, Visible

__all__ = [
    "KVPages",
    "PageLayout",
    "RaggedBatch",
    "Visible",
    "attend",
    "paged_attention",
    "write_kv",
]
