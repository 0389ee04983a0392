"""Products that send tokens along a ring while they multiply."""

from pallas_kernels.collective_matmul.api import all_gather_matmul, matmul_reduce_scatter
from pallas_kernels.collective_matmul.choice import Rates, worth_it

__all__ = ["Rates", "all_gather_matmul", "matmul_reduce_scatter", "worth_it"]
