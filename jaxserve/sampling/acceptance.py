"""Rules by which a step keeps drafts, other than the exact one.

Each decides for a single token, where a draft comes next: whether the draft is the token, or what
else is. They take the draft's chance from the distribution that the token would be sampled from,
after temperature, filters, masks and penalties. Rows that take the likeliest token, and those
without a draft, are sampled as ever.

rejection: Leviathan et al. ("Fast Inference from Transformers via Speculative Decoding", 2023). A
    draft of probability q where the model gives it p is kept with probability min(1, p / q); in
    its place comes a sample of max(0, p - q). The token has the distribution p. A draft that was
    not drawn is a point mass: q is 1.
typical: Cai et al. ("Medusa", 2024). A draft is kept if p > min(threshold, alpha * exp(-H)), H is
    the entropy of the distribution in nats. The tokens have another distribution.

Drafts are drawn with the noise of (seed, position), so a rule takes other noise of the two.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.models import parallel
from jaxserve.sampling.noise import exponentials
from jaxserve.sampling.vocabulary import largest

_TO_ACCEPT, _TO_REPLACE = 0x9E3779B9, 0x7F4A7C15
"""What turns the seed into those of the rule's own noise."""


class AcceptanceRule(NamedTuple):
    """`threshold` and `alpha` are of "typical" only."""

    name: Literal["rejection", "typical"]
    threshold: float = 0.0
    alpha: float = 0.0


class Drafted(NamedTuple):
    """The draft that comes next in each row: int32 [rows], negative where there is none. `probs`
    float32 [rows, padded vocab] is the distribution that it was drawn from, zeros where it was not
    drawn; None if none was."""

    token_ids: jax.Array
    probs: jax.Array | None


def decide(
    rule: AcceptanceRule,
    weights: jax.Array,
    sampled: jax.Array,
    drafted: Drafted,
    seeds: jax.Array,
    positions: jax.Array,
    count: int,
) -> jax.Array:
    """The tokens int32 [rows] by a rule: the draft where it is kept.

    `weights` float32 [rows, padded vocab] are proportional to the distribution, of this rank's
    `count` tokens; `sampled` int32 [rows] are the tokens without drafts, `seeds` uint32 [rows, 2]
    and `positions` int32 [rows] as in `exponentials`.
    """
    draft = drafted.token_ids
    total = parallel.sum_over_vocab(jnp.sum(weights, axis=1))
    probs = weights / total[:, None]
    chance = _at(probs, draft, count)
    if rule.name == "typical":
        logs = jnp.log(jnp.where(probs > 0, probs, 1.0))
        entropy = -parallel.sum_over_vocab(jnp.sum(probs * logs, axis=1))
        kept = chance > jnp.minimum(rule.threshold, rule.alpha * jnp.exp(-entropy))
        other = sampled
    else:
        own = _own(draft, probs, count)
        given = own
        if drafted.probs is not None:
            drawn = parallel.sum_over_vocab(jnp.sum(drafted.probs, axis=1)) > 0
            given = jnp.where(drawn[:, None], drafted.probs, own)
        ratio = chance / _at(given, draft, count)
        one = jnp.zeros(1, jnp.int32)
        # A uniform variate is below the ratio where an exponential one is above -log(ratio).
        waited = exponentials(seeds ^ jnp.uint32(_TO_ACCEPT), positions, one)[:, 0]
        kept = waited > -jnp.log(ratio)
        rest = jnp.maximum(probs - given, 0.0)
        token_ids = parallel.first_of_vocab(count) + jnp.arange(probs.shape[1], dtype=jnp.int32)
        noise = exponentials(seeds ^ jnp.uint32(_TO_REPLACE), positions, token_ids)
        best, place = largest(rest / noise)
        other = parallel.vocab_parallel_argmax(place, best, count)
        # Without a rest both distributions are the same but for rounding.
        left = parallel.max_over_vocab(best) > 0
        kept |= ~left
    return jnp.where((draft < 0) | (sampled < 0), sampled, jnp.where(kept, draft, other))


def _own(token_ids: jax.Array, probs: jax.Array, count: int) -> jax.Array:
    """One at each row's token and zeros elsewhere, in the shape of `probs`."""
    places = parallel.first_of_vocab(count) + jnp.arange(probs.shape[1], dtype=jnp.int32)
    real = jnp.arange(probs.shape[1]) < count
    return ((places == token_ids[:, None]) & real).astype(probs.dtype)


def _at(probs: jax.Array, token_ids: jax.Array, count: int) -> jax.Array:
    """The probability of each row's token [rows]."""
    return parallel.sum_over_vocab(jnp.sum(_own(token_ids, probs, count) * probs, axis=1))
