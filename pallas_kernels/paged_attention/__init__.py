"""Ragged attention over paged keys and values (PagedAttention, 2309.06180)."""

from pallas_kernels.paged_attention.api import attend, paged_attention, tree_attention
from pallas_kernels.paged_attention.chunks import attend_within_chunks, before_chunks
from pallas_kernels.paged_attention.layout import (
    DecodeGroups,
    KVPages,
    LatentPages,
    PageLayout,
    Pages,
    Paths,
    RaggedBatch,
    Visible,
)
from pallas_kernels.paged_attention.tree import attend_densely
from pallas_kernels.paged_attention.write import move_kv, write_kv

__all__ = [
    "DecodeGroups",
    "KVPages",
    "LatentPages",
    "PageLayout",
    "Pages",
    "Paths",
    "RaggedBatch",
    "Visible",
    "attend",
    "attend_densely",
    "attend_within_chunks",
    "before_chunks",
    "move_kv",
    "paged_attention",
    "tree_attention",
    "write_kv",
]
