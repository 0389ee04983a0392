"""Collective matmuls: products overlapped with the communication of their tokens."""

from pallas_kernels.collective_matmul.api import all_gather_matmul, matmul_reduce_scatter
from pallas_kernels.collective_matmul.choice import CollectiveRates, worth_it

__all__ = ["CollectiveRates", "all_gather_matmul", "matmul_reduce_scatter", "worth_it"]
