"""Sum of parts, residual and RMS norm in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def add_and_norm(
    x: jax.Array, parts: jax.Array, weight: jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """As `api.add_and_norm`."""
    total = jnp.sum(parts, axis=0, dtype=jnp.float32)
    added = x + total.astype(x.dtype)
    wide = added.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return added, (wide * scale).astype(x.dtype) * weight
