"""Copies of whole pages, of all layers together, within the pool and in and out of it."""

from pallas_kernels.page_copy.api import copy_pages, gather_pages, scatter_pages
from pallas_kernels.page_copy.image import image_dtype, image_elements

__all__ = ["copy_pages", "gather_pages", "image_dtype", "image_elements", "scatter_pages"]
