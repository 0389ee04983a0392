"""Merging of partial attention results over disjoint keys."""

from pallas_kernels.merge.api import (
    empty_partial,
    merge,
    merge_over,
    merge_scattered,
    merge_sinks,
    merge_two,
)

__all__ = [
    "empty_partial",
    "merge",
    "merge_over",
    "merge_scattered",
    "merge_sinks",
    "merge_two",
]
