"""Merging in plain XLA. It reads every partial once and fuses with its producers."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def merge(outs, lses):
    peak = jnp.max(lses, axis=0, initial=-jnp.inf)
    values, weights = _weigh(outs, lses, peak)
    return _normalise(values.sum(0), weights.sum(0), peak, outs.dtype)


def merge_two(out, lse, other_out, other_lse):
    peak = jnp.maximum(lse, other_lse)
    values, weights = _weigh(out, lse, peak)
    other_values, other_weights = _weigh(other_out, other_lse, peak)
    dtype = jnp.promote_types(out.dtype, other_out.dtype)
    return _normalise(values + other_values, weights + other_weights, peak, dtype)


def merge_over(axis_name, out, lse):
    peak = lax.pmax(lse, axis_name)
    values, weights = lax.psum(_weigh(out, lse, peak), axis_name)
    return _normalise(values, weights, peak, out.dtype)


def merge_scattered(axis_name, out, lse):
    peak = lax.pmax(lse, axis_name)
    values, weights = _weigh(out, lse, peak)
    both = jnp.concatenate([values, weights[..., None]], axis=-1)  # one message, not two
    both = lax.psum_scatter(both, axis_name, scatter_dimension=0, tiled=True)
    peak = lax.dynamic_slice_in_dim(peak, lax.axis_index(axis_name) * len(both), len(both))
    return _normalise(both[..., :-1], both[..., -1], peak, out.dtype)


def merge_sinks(out, lse, sinks):
    present = lse > -jnp.inf
    whole = jnp.where(present, jnp.logaddexp(lse, sinks), lse)
    share = jnp.exp(jnp.where(present, lse - whole, 0))
    return out.astype(jnp.float32) * share[..., None], whole


def _weigh(out, lse, peak):
    """Values [..., head_dim] and weights [...] float32, relative to the largest lse `peak`."""
    present = lse > -jnp.inf
    weights = jnp.where(present, jnp.exp(lse - jnp.where(present, peak, 0)), 0)
    values = jnp.where(present[..., None], out.astype(jnp.float32) * weights[..., None], 0)
    return values, weights


def _normalise(values, weights, peak, dtype):
    """Out and lse of summed values and weights; weights are 0 where every partial was empty."""
    total = jnp.where(weights > 0, weights, 1)
    return (values / total[..., None]).astype(dtype), peak + jnp.log(total)
