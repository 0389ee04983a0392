"""Merging partial attention results by their log-sum-exps (the merge of 2205.14135, 2501.01005).

A partial is attention over some of the keys: `out` [..., head_dim] and `lse` [...] float32, the
log-sum-exp of its scores. The partial over no keys at all is (0, -inf). Partials over disjoint keys
are a commutative monoid under `merge_two`, up to rounding, with the empty partial as its identity
to the last bit: where only one partial is not empty, the result is that one unchanged. The `out` of
an empty partial is never read and may be NaN.

An attention sink is a partial too: out = 0, and its logit as the lse.

Sums are float32, whatever the dtype of `out`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.merge import xla


def merge(outs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merge a stack of partials.

    outs [parts, ..., head_dim], lses [parts, ...] float32; usually [parts, tokens, heads, head_dim]
    and [parts, tokens, heads]. Zero parts give an empty partial.

    Returns out [..., head_dim] in the dtype of outs and lse [...] float32. Raises ValueError when
    the shapes do not match or lses are not float32.
    """
    _check(outs, lses)
    if lses.ndim == 0:
        raise ValueError("outs is [head_dim]; a stack of partials is [parts, ..., head_dim].")
    return xla.merge(outs, lses)


def merge_two(
    out: jax.Array, lse: jax.Array, other_out: jax.Array, other_lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Merge two partials of equal shape, out [..., head_dim] and lse [...] float32 each.

    Returns the same, `out` in the wider of the two dtypes: a running float32 result stays float32
    when bfloat16 partials are merged into it. Raises ValueError as `merge` does.
    """
    _check(out, lse)
    _check(other_out, other_lse)
    if out.shape != other_out.shape:
        raise ValueError(f"Partials of shapes {out.shape} and {other_out.shape} cannot be merged.")
    return xla.merge_two(out, lse, other_out, other_lse)


def merge_over(
    axis_name: str | tuple[str, ...], out: jax.Array, lse: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Merge the partials of the same queries over the devices along one or several mesh axes.

    For use inside `jax.shard_map`: out [..., head_dim] and lse [...] float32 are this device's.
    Takes a maximum of the lses over the axis, then a sum. Every device gets the same result, in the
    dtype of `out`. Raises ValueError as `merge` does.
    """
    _check(out, lse)
    return xla.merge_over(axis_name, out, lse)


def merge_scattered(axis_name: str, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """As `merge_over`, with the result scattered evenly over the devices.

    out [queries, ..., head_dim] and lse [queries, ...]; device r of n gets the r-th of n parts of
    the queries, [queries / n, ...]. Raises ValueError as `merge` does, and when n does not divide
    the queries.
    """
    _check(out, lse)
    ranks = jax.lax.axis_size(axis_name)
    if out.shape[0] % ranks:
        raise ValueError(f"{out.shape[0]} queries cannot be split evenly over {ranks} devices.")
    return xla.merge_scattered(axis_name, out, lse)


def merge_sinks(out: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merge attention sinks, float32 [heads], into complete results.

    out [tokens, heads, head_dim] and lse [tokens, heads] float32. Returns the same, `out` in
    float32. Results over no keys stay empty. Raises ValueError as `merge` does.
    """
    _check(out, lse)
    return xla.merge_sinks(out, lse, sinks)


def empty_partial(q: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Attention of q [..., head_dim] over no keys: out of `dtype` in its shape, and lse [...]."""
    return jnp.zeros(q.shape, dtype), jnp.full(q.shape[:-1], -jnp.inf, jnp.float32)


def _check(outs, lses):
    if outs.shape[:-1] != lses.shape or outs.ndim == 0:
        raise ValueError(
            f"outs has shape {outs.shape} and lses {lses.shape}; lses must have the shape of outs "
            "without its last dimension, head_dim."
        )
    if lses.dtype != jnp.float32:
        raise ValueError(f"lses is {lses.dtype}; log-sum-exps are float32.")
    if not jnp.issubdtype(outs.dtype, jnp.floating):
        raise ValueError(f"outs is {outs.dtype}; it must be a floating dtype.")
