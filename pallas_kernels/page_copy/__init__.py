"""Copies of whole pages, of all layers together, within the pool and in and out of it."""

from pallas_kernels.page_copy.api import copy_pages, gather_pages, scatter_pages
from pallas_kernels.page_copy.rows import row_dtype, row_elements

__all__ = ["copy_pages", "gather_pages", "row_dtype", "row_elements", "scatter_pages"]
