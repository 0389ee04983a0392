"""Attention over parts of the keys, put together to attention over all of them."""

from pallas_kernels.merge.api import empty_partial, merge, merge_over, merge_scattered, merge_two

__all__ = ["empty_partial", "merge", "merge_over", "merge_scattered", "merge_two"]
