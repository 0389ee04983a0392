"""Branches of sampling programs, which GPUs do not have.

A loop or conditional on a GPU whose predicate is computed there is driven by the host, which waits
for it and with that for all steps before. What a branch leaves out costs less than that wait.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def unless_skipped(wanted: jax.Array) -> jax.Array:
    """Whether to take a branch that changes nothing if the bool scalar `wanted` is not set: as
    wanted, and on GPUs always, where XLA then sees a constant and removes the branch."""
    return lax.platform_dependent(wanted, cuda=jnp.ones_like, default=lambda wanted: wanted)
