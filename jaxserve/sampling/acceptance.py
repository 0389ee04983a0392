"""Rules by which a step accepts drafts, other than the exact one.

Each decides for a single token, where drafts come next: whether one of them is the token, or what
else is. They take a draft's chance from the distribution that the token would be sampled from,
after temperature, filters, masks and penalties. Rows that take the most likely token, and those
without a draft, are sampled as ever.

rejection: Leviathan et al. ("Fast Inference from Transformers via Speculative Decoding", 2023). A
    draft of probability q where the model gives it p is accepted with probability min(1, p / q); in
    its place comes a sample of max(0, p - q). The token has the distribution p. A draft that was
    not drawn is a point mass: q is 1. Of several drafts one after another is tried, as in SpecInfer
    (Miao et al. 2024): after a refusal p is what is left, and q has one token less, for drafts of
    the same token are different ones (Jeon et al., "Recursive Speculative Decoding", 2024).
typical: Cai et al. ("Medusa", 2024). A draft is accepted if p > min(threshold, alpha * exp(-H)), H
    is the entropy of the distribution in nats. The tokens have another distribution.

Drafts are drawn with the noise of (seed, position), so a rule takes other noise of the two.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.core.settings.speculative import SpeculativeConfig
from jaxserve.core.steps.results import NO_TOKEN
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

    @classmethod
    def of(cls, config: SpeculativeConfig) -> AcceptanceRule | None:
        """The rule of these settings; None for the exact one."""
        if config.acceptance == "exact":
            return None
        if config.acceptance == "rejection":
            return cls("rejection")
        return cls("typical", config.posterior_threshold, config.posterior_alpha)


class Drafted(NamedTuple):
    """The drafts of the token that comes next in each row: int32 [rows, most], different ones,
    negative after the last. `probs` float32 [rows, padded vocab] is the distribution that they were
    drawn from without replacement, zeros where they were not drawn; None if none was."""

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
    """The tokens int32 [rows] by a rule: the draft where it is accepted.

    `weights` float32 [rows, padded vocab] are proportional to the distribution, of this rank's
    `count` tokens; `sampled` int32 [rows] are the tokens without drafts, `seeds` uint32 [rows, 2]
    and `positions` int32 [rows] as in `exponentials`.
    """
    draft = drafted.token_ids[:, 0]
    probs = weights / _total(weights)
    if rule.name == "typical":
        chance = _at(probs, draft, count)
        logs = jnp.log(jnp.where(probs > 0, probs, 1.0))
        entropy = -parallel.sum_over_vocab(jnp.sum(probs * logs, axis=1))
        accepted = chance > jnp.minimum(rule.threshold, rule.alpha * jnp.exp(-entropy))
        chosen = jnp.where(accepted, draft, sampled)
    else:
        chosen = _by_rejection(probs, drafted, seeds, positions, count)
    return jnp.where((draft < 0) | (sampled < 0), sampled, chosen)


_Tried = tuple[jax.Array, jax.Array | None, jax.Array]
"""What is left of p and of q, [rows, padded vocab], and the accepted draft, int32 [rows]."""


def _by_rejection(
    probs: jax.Array, drafted: Drafted, seeds: jax.Array, positions: jax.Array, count: int
) -> jax.Array:
    """The first draft that is accepted, or else a sample of what is left."""
    one = jnp.zeros(1, jnp.int32)

    def tried(carry: _Tried, numbered: tuple[jax.Array, jax.Array]) -> tuple[_Tried, None]:
        (left, given, chosen), (number, draft) = carry, numbered
        q = own = _own(draft, probs, count)
        if given is not None:
            mass = _total(given)
            q = jnp.where(mass > 0, given / mass, own)
            given = given * (1 - own)
        ratio = _at(left, draft, count) / _at(q, draft, count)
        # A uniform variate is below the ratio where an exponential one is above -log(ratio).
        noise = exponentials(seeds ^ (jnp.uint32(_TO_ACCEPT) + number), positions, one)[:, 0]
        rest = jnp.maximum(left - q, 0.0)
        mass = _total(rest)
        # Without a rest both distributions are the same but for rounding.
        accepted = (draft >= 0) & ((noise > -jnp.log(ratio)) | (mass[:, 0] == 0))
        chosen = jnp.where((chosen < 0) & accepted, draft, chosen)
        left = jnp.where((draft[:, None] >= 0) & (mass > 0), rest / mass, left)
        return (left, given, chosen), None

    drafts = drafted.token_ids.T
    numbered = jnp.arange(len(drafts), dtype=jnp.uint32), drafts
    before = probs, drafted.probs, jnp.full(len(probs), NO_TOKEN)
    (left, _, chosen), _ = lax.scan(tried, before, numbered)
    token_ids = parallel.first_of_vocab(count) + jnp.arange(probs.shape[1], dtype=jnp.int32)
    noise = exponentials(seeds ^ jnp.uint32(_TO_REPLACE), positions, token_ids)
    best, place = largest(left / noise)
    other = parallel.vocab_parallel_argmax(place, best, count)
    return jnp.where(chosen < 0, other, chosen)


def _total(weights: jax.Array) -> jax.Array:
    """The sum of each row [rows, 1], over all ranks."""
    return parallel.sum_over_vocab(jnp.sum(weights, axis=1))[:, None]


def _own(token_ids: jax.Array, probs: jax.Array, count: int) -> jax.Array:
    """One at each row's token and zeros elsewhere, in the shape of `probs`."""
    places = parallel.first_of_vocab(count) + jnp.arange(probs.shape[1], dtype=jnp.int32)
    real = jnp.arange(probs.shape[1]) < count
    return ((places == token_ids[:, None]) & real).astype(probs.dtype)


def _at(probs: jax.Array, token_ids: jax.Array, count: int) -> jax.Array:
    """The probability of each row's token [rows]."""
    return parallel.sum_over_vocab(jnp.sum(_own(token_ids, probs, count) * probs, axis=1))
