"""Branches of sampling programs, which GPUs do not have.

A loop or conditional on a GPU whose predicate is computed there is driven by the host, which waits
for it and with that for all steps before. So GPUs compute what a branch would leave out; how the
two compare has not been measured.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.platforms import by_platform


def is_taken(wanted: jax.Array) -> jax.Array:
    """Whether a program takes a branch: if the bool scalar `wanted` is set, and on GPUs always.

    There XLA sees a constant, and no branch is left. One that is not wanted must change nothing.
    """
    return by_platform(wanted, cuda=jnp.ones_like, default=lambda wanted: wanted)
