"""Residual additions with the RMS norm that follows them."""

from pallas_kernels.residual_norm.api import add_and_norm, product_parts

__all__ = ["add_and_norm", "product_parts"]
