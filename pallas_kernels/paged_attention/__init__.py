"""Ragged attention over paged keys and values (PagedAttention, 2309.06180)."""

from pallas_kernels.paged_attention.api import attend, paged_attention, write_kv
from pallas_kernels.paged_attention.layout import (
    KVPages,
    LatentPages,
    PageLayout,
    Pages,
    RaggedBatch,
    Visible,
)

__all__ = [
    "KVPages",
    "LatentPages",
    "PageLayout",
    "Pages",
    "RaggedBatch",
    "Visible",
    "attend",
    "paged_attention",
    "write_kv",
]
