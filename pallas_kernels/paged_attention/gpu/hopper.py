"""Online softmax steps shared by the Hopper kernels of paged attention.

They use powers of two, because the hardware has exp2.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

MASKED = -1e30
LOG2E = math.log2(math.e)


def soft_capped(products: jax.Array, scale: float, soft_cap: float, unit: float = 1.0) -> jax.Array:
    """soft_cap * tanh(scale * products / soft_cap), times `unit`.

    tanh from exp2, with an error of a few units in the last place; the hardware's tanh has eleven
    correct bits.
    """
    growth = jnp.exp2(products * (2 * scale * LOG2E / soft_cap))
    return (1 - 2 / (growth + 1)) * (soft_cap * unit)


def across(per_row: jax.Array, columns: int) -> jax.Array:
    """[rows] as [rows, columns]."""
    return lax.broadcast_in_dim(per_row, (per_row.shape[0], columns), (0,))
