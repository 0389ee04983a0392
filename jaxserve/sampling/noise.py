"""Sampling noise: a function of (seed, output position, token id) only.

A token is drawn as the winner of a race: with E independent and exponential, the token with the
largest weight / E is drawn with probability proportional to its weight. This is the Gumbel-max
trick without its second logarithm (argmax of log(weight) + g, where g = -log(E)). Unlike an inverse
CDF it needs no sums over the vocabulary, so rounding elsewhere moves no boundary: a token changes
only when two tokens tie within rounding. On a mesh each rank races its own part of the vocabulary.
A drafter that uses the same noise is accepted at least (1 - d) / (1 + d) of the time, d being the
total variation distance (Daliri, Musco and Suresh, "Coupling without Communication", 2024).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_SERIES_BELOW = 2.0**-10
_LARGEST = 1 - 2.0**-24


def exponentials(seed_words: jax.Array, positions: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Exponential variates float32 [rows, n], finite and above 0.

    `seed_words` uint32 [rows, 2] and `positions` int32 [rows] are per row, `token_ids` int32 [n]
    are shared. Threefry makes one key per row; two rounds of an integer hash make the variates of
    its tokens, which is cheaper than Threefry per token.
    """

    def key_of(words: jax.Array, position: jax.Array) -> jax.Array:
        # Explicit, so that JAX's default generator and its settings do not matter.
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(key, position))

    keys = jax.vmap(key_of)(seed_words, positions)
    bits = _mix(token_ids.astype(jnp.uint32)[None, :] + keys[:, :1])
    bits = _mix(bits ^ keys[:, 1:])
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, _LARGEST)
    # -log(1 - u). Small variates win races, and the logarithm would keep too few of their digits.
    series = uniform + 0.5 * uniform * uniform
    return jnp.where(uniform < _SERIES_BELOW, series, -jnp.log(1 - uniform))


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 whose every output bit depends on every input bit (lowbias32, by
    Chris Wellons, "Prospecting for Hash Functions", 2018)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
