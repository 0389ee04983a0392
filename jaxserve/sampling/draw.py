"""Drawing one token a row: a keyed uniform number and the inverse of a two-level CDF."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sampling.blocks import BLOCK, keep, ordered_sum, take_cells


def keyed_uniforms(seed_words: jax.Array, positions: jax.Array) -> jax.Array:
    """One float32 in [0, 1) a row, a function of its seed and output position alone.

    `seed_words` is uint32 [rows, 2], `positions` int32 [rows]. Threefry is named explicitly so
    that neither JAX's default generator nor its settings change anybody's tokens.
    """

    def draw(words: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position))

    return jax.vmap(draw)(seed_words, positions)


def inverse_cdf(
    weights: jax.Array, floor: jax.Array, uniforms: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Token ids int32 [rows] with probability proportional to weight, and the mass drawn from.

    `weights` is float32 [rows, blocks * BLOCK]; those below `floor` [rows] count as zero and are
    never drawn. `uniforms` [rows] in [0, 1) picks along the ids in ascending order, so 0 gives
    the lowest id kept. The mass is NaN or zero if there was nothing to draw, and the id arbitrary.
    """
    masses = ordered_sum(keep(weights, floor).reshape(weights.shape[0], -1, BLOCK))
    to_block = jnp.cumsum(masses, axis=1)
    total = to_block[:, -1]
    target = uniforms * total
    block, before = _pick(masses, to_block, target)
    inside = keep(take_cells(weights, BLOCK, block[:, None]), floor)
    token, _ = _pick(inside, jnp.cumsum(inside, axis=1), target - before)
    return block * BLOCK + token, total


def _pick(
    weights: jax.Array, cumulative: jax.Array, target: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """First index [rows] whose cumulative weight exceeds `target`, and the weight before it.

    Rounding can leave the target at or past the end, and can make a cumulative sum grow at a
    weight of zero. Only positive weights are eligible, and the last of them catches the rest.
    """
    positive = weights > 0
    indices = lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    last = jnp.max(jnp.where(positive, indices, 0), axis=1, keepdims=True)
    beyond = positive & (cumulative > target[:, None])
    index = jnp.min(jnp.where(beyond, indices, last), axis=1)
    previous = jnp.maximum(index - 1, 0)[:, None]
    before = jnp.take_along_axis(cumulative, previous, axis=1)[:, 0]
    return index, jnp.where(index > 0, before, 0.0)
