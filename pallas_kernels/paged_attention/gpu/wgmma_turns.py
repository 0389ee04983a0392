"""Products that a warpgroup issues to Hopper's tensor cores in one turn, then waits for.

Products of a turn are queued back to back. Each function calls `meanwhile` after issuing the work
and before it has completed: this is when another warpgroup can queue its own. Left operands in
registers are read before anything else is computed: versions of ptxas before CUDA 13.3 may
otherwise reuse them too early (triton-lang/triton issues 9433, 11781).

The interpreter supports products of shared memory only; for the others the same values are computed
in plain JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.compat import gpu as compat


def products(a: Any, bs: Sequence[Any], meanwhile: Callable[[], None]) -> jax.Array:
    """float32 a @ [bs side by side], references to shared memory."""

    def multiply(result):
        _multiply(result, a, bs)
        meanwhile()
        return result[...]  # waits

    return pl.run_scoped(multiply, _products_of(a, bs))


def add_product(
    total: jax.Array, left: jax.Array, right: Any, meanwhile: Callable[[], None], interpret: Any
) -> jax.Array:
    """float32 total + left @ right, the latter in registers and in shared memory."""
    if interpret:
        meanwhile()
        return compat.add_products(total, [left], [right], interpret)

    def multiply(accumulator):
        accumulator[...] = total
        plgpu.wgmma(accumulator, left, right)
        meanwhile()
        return accumulator[...]  # waits

    return pl.run_scoped(multiply, plgpu.ACC(total.shape, jnp.float32))


def products_and_add_product(
    a: Any,
    bs: Sequence[Any],
    total: jax.Array,
    left: jax.Array,
    right: Any,
    meanwhile: Callable[[], None],
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """Both of the above in one turn."""
    if interpret:
        return products(a, bs, meanwhile), compat.add_products(total, [left], [right], interpret)

    def multiply(result, accumulator):
        accumulator[...] = total
        _multiply(result, a, bs)
        plgpu.wgmma(accumulator, left, right)
        meanwhile()
        return result[...], accumulator[...]  # waits for both

    return pl.run_scoped(multiply, _products_of(a, bs), plgpu.ACC(total.shape, jnp.float32))


def _products_of(a, bs):
    return plgpu.ACC((a.shape[0], sum(b.shape[1] for b in bs)), jnp.float32)


def _multiply(result, a, bs):
    """result += a @ [bs side by side]."""
    start = 0
    for b in bs:
        columns = b.shape[1]
        plgpu.wgmma(result.at[:, start : start + columns], a, b)
        start += columns
