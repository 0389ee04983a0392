"""The two sampling programs: `greedy` and `general`."""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sampling import rows as row
from jaxserve.sampling.blocks import padded_vocab
from jaxserve.sampling.draw import inverse_cdf, keyed_uniforms
from jaxserve.sampling.logprobs import TokenLogprobs, no_logprobs, token_logprobs
from jaxserve.sampling.process import add_bias, ban_tokens, mask_tokens, penalize, when
from jaxserve.sampling.state import SamplingState, record
from jaxserve.sampling.threshold import weight_floor

# In place of a token id when a row's logits are NaN throughout or leave nothing to sample.
NO_TOKEN = -1

_GROUP = 64


@flax.struct.dataclass
class SampleOutput:
    """`token_ids` int32 [rows], NO_TOKEN where sampling failed; logprobs zero if not asked for."""

    token_ids: jax.Array
    logprobs: TokenLogprobs


def greedy(logits: jax.Array) -> jax.Array:
    """Most likely token int32 [rows] of `logits` float32 [vocab, rows]; the lowest id of equals.

    Finds the best group of consecutive tokens first and then the token in it: XLA's argmax, which
    carries an index along with every value, is two to five times slower on CPUs.
    """
    vocab_size, rows = logits.shape
    padded = jnp.pad(logits, ((0, -vocab_size % _GROUP), (0, 0)), constant_values=-jnp.inf)
    groups = padded.reshape(-1, _GROUP, rows)
    group_max = jnp.max(groups, axis=1)
    group = jnp.argmax(group_max, axis=0)
    members = jnp.take_along_axis(groups, group[None, None, :], axis=0)[0]
    token = (group * _GROUP + jnp.argmax(members, axis=0)).astype(jnp.int32)
    return jnp.where(jnp.max(group_max, axis=0) > -jnp.inf, token, NO_TOKEN)


def general(
    logits: jax.Array, state: SamplingState, meta: jax.Array, masks: jax.Array
) -> tuple[SampleOutput, SamplingState]:
    """Samples one token a row with everything SamplingParams offers.

    `logits` float32 [vocab, rows]; `meta` int32 [rows, NUM_FIELDS] from `pack_rows`; real rows
    have slots of their own. `masks` int32 [rows, mask_words] has a bit for each token that a row
    with FLAG_MASK may sample; the rows of the others are not read. Returns the state with the
    tokens recorded where they will be needed. A row's token depends on its logits, its state, its
    fields, its mask, and nothing else in the batch.
    """
    floats = lax.bitcast_convert_type(meta, jnp.float32)
    slots, flags = meta[:, row.SLOT], meta[:, row.FLAGS]
    temperature = floats[:, row.TEMPERATURE]

    scores = _processed(logits, state, meta, floats, masks)
    best = jnp.max(scores, axis=1)
    weights = _weights(scores, best, temperature)
    floor = weight_floor(weights, meta[:, row.TOP_K], floats[:, row.TOP_P], floats[:, row.MIN_P])
    token_ids, mass = inverse_cdf(weights, floor, _uniforms(meta, temperature))
    token_ids = jnp.where((best > -jnp.inf) & (mass > 0), token_ids, NO_TOKEN)

    logprobs = lax.cond(
        _any(flags, row.FLAG_LOGPROBS),
        lambda: token_logprobs(logits, token_ids, _any(flags, row.FLAG_TOP_LOGPROBS)),
        lambda: no_logprobs(logits.shape[1]),
    )
    state = record(state, slots, token_ids, flags & row.FLAG_TRACK > 0)
    return SampleOutput(token_ids=token_ids, logprobs=logprobs), state


def _any(flags: jax.Array, flag: int) -> jax.Array:
    return jnp.any(flags & flag > 0)


def _processed(
    logits: jax.Array, state: SamplingState, meta: jax.Array, floats: jax.Array, masks: jax.Array
) -> jax.Array:
    """Scores [rows, padded vocab]: logits with mask, bias, bans and penalties; -inf in the padding.

    Rows are made contiguous first. It costs one pass and makes all later ones, and the gathers of
    state, run along memory.
    """
    vocab_size = logits.shape[0]
    slots, flags = meta[:, row.SLOT], meta[:, row.FLAGS]
    padding = padded_vocab(vocab_size) - vocab_size
    scores = jnp.pad(logits.T, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    biased = flags & row.FLAG_BIAS > 0
    early = meta[:, row.POSITION] < meta[:, row.MIN_TOKENS]
    worded = flags & row.FLAG_BAD_WORDS > 0
    masked = flags & row.FLAG_MASK > 0
    penalties = [floats[:, field] for field in (row.PRESENCE, row.FREQUENCY, row.REPETITION)]
    scores = when(jnp.any(masked), functools.partial(mask_tokens, masked=masked), scores, masks)
    stages = (
        (jnp.any(biased), functools.partial(add_bias, biased=biased)),
        (
            jnp.any(early | worded),
            functools.partial(ban_tokens, before_min_tokens=early, with_bad_words=worded),
        ),
        (_any(flags, row.FLAG_PENALTY), functools.partial(penalize, penalties=penalties)),
    )
    for wanted, stage in stages:
        scores = when(wanted, functools.partial(stage, state=state), scores, slots)
    return scores


def _weights(scores: jax.Array, best: jax.Array, temperature: jax.Array) -> jax.Array:
    """exp((score - best) / temperature) [rows, padded vocab]; one-hot on the best when greedy."""
    sampled = temperature > 0
    scale = jnp.where(sampled, 1.0 / temperature, 0.0)[:, None]
    distance = scores - best[:, None]
    weights = jnp.where(
        sampled[:, None], jnp.exp(distance * scale), (distance == 0).astype(jnp.float32)
    )
    # Recomputing exp in each consumer could round it differently on either side of a threshold.
    return lax.optimization_barrier(weights)


def _uniforms(meta: jax.Array, temperature: jax.Array) -> jax.Array:
    """Draws [rows] in [0, 1), zero for greedy rows, which then take the lowest of equal ids."""
    seeds = lax.bitcast_convert_type(meta[:, row.SEED_HIGH : row.SEED_LOW + 1], jnp.uint32)
    return jnp.where(temperature > 0, keyed_uniforms(seeds, meta[:, row.POSITION]), 0.0)
