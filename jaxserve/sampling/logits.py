"""Logits processing before sampling: masks and bias, bans, penalties.

The order is vLLM's: grammar masks, allowed ids, bad words, min_tokens and bias first, then
penalties. Logits are [rows, padded vocab] here, of this rank's `count` tokens and padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.models import parallel
from jaxserve.sampling.branches import is_taken
from jaxserve.sampling.state import SamplingState, recent_tokens
from jaxserve.structured.bitmask import WORD_BITS


def when(
    flag: jax.Array,
    stage: Callable[[jax.Array, jax.Array], jax.Array],
    logits: jax.Array,
    upload: jax.Array,
) -> jax.Array:
    """stage(logits, upload) if the bool scalar `flag` is set, else the logits untouched. On GPUs
    the stage always runs, so it must leave rows that do not ask for it as they are.

    A loop of zero or one trips, which unlike a conditional does not copy logits that it leaves
    unchanged. The barrier ties `upload` to the trip: otherwise XLA would hoist loop-invariant work
    on it out of the loop and always run it.
    """

    def trip(index: jax.Array, logits: jax.Array) -> jax.Array:
        this_upload, _ = lax.optimization_barrier((upload, index))
        return stage(logits, this_upload)

    return lax.fori_loop(0, is_taken(flag).astype(jnp.int32), trip, logits)


def mask_tokens(logits: jax.Array, masks: jax.Array, masked: jax.Array, count: int) -> jax.Array:
    """-inf for tokens without a bit in `masks` int32 [rows, mask_words], for the rows with `masked`
    bool [rows]."""
    bits = masks[:, :, None] >> jnp.arange(WORD_BITS) & 1
    bits = bits.reshape(len(masks), -1)
    whole = max(parallel.num_vocab_ranks() * count, bits.shape[1])
    bits = jnp.pad(bits, ((0, 0), (0, whole - bits.shape[1])))
    bits = lax.dynamic_slice_in_dim(bits, parallel.first_of_vocab(count), count, axis=1)
    allowed = jnp.pad(bits, ((0, 0), (0, logits.shape[1] - count))) > 0
    return jnp.where(allowed | ~masked[:, None], logits, -jnp.inf)


def add_bias(
    logits: jax.Array, slots: jax.Array, state: SamplingState, biased: jax.Array
) -> jax.Array:
    """Adds the slot's bias row for the rows with `biased` bool [rows]."""
    return jnp.where(biased[:, None], logits + state.bias[slots], logits)


def ban_tokens(
    logits: jax.Array,
    slots: jax.Array,
    state: SamplingState,
    before_min_tokens: jax.Array,
    with_bad_words: jax.Array,
    pending: jax.Array | None,
    count: int,
) -> jax.Array:
    """-inf for stop tokens before min_tokens, and for tokens that would complete a bad word.

    Both flags are bool [rows]. Bad words are matched against the output, not the prompt; `pending`
    as in `recent_tokens`.
    """
    words = state.bad_words[slots]
    prefix, last = words[:, :, :-1], words[:, :, -1]
    recent = recent_tokens(state, slots, pending)[:, None, :]
    complete = jnp.all((prefix < 0) | (prefix == recent), axis=2) & with_bad_words[:, None]
    stops = jnp.where(before_min_tokens[:, None], state.stop_ids[slots], -1)
    banned = jnp.concatenate([jnp.where(complete, last, -1), stops], axis=1)
    rows = lax.broadcasted_iota(jnp.int32, banned.shape, 0)
    place = banned - parallel.first_of_vocab(count)
    place = jnp.where((place >= 0) & (place < count), place, logits.shape[1])
    return logits.at[rows, place].set(-jnp.inf, mode="drop")


def penalize(
    logits: jax.Array,
    slots: jax.Array,
    state: SamplingState,
    penalties: Sequence[jax.Array],
    pending: jax.Array | None,
    vocab: int,
) -> jax.Array:
    """Repetition penalty over prompt and output (CTRL, Keskar et al. 2019), then the other two.

    `penalties` are presence, frequency and repetition, float32 [rows] each; 0, 0 and 1 leave a
    row bit-identical, whatever its slot. `pending` as in `recent_tokens`, of this rank's `vocab`
    tokens or others.
    """
    presence, frequency, repetition = penalties
    seen = state.seen[slots]
    if pending is not None:
        rows = lax.broadcasted_iota(jnp.int32, pending.shape, 0)
        place = pending - parallel.first_of_vocab(vocab)
        own = (pending >= 0) & (place >= 0) & (place < vocab)
        seen = seen.at[rows, jnp.where(own, place, seen.shape[1])].add(2, mode="drop")
    count = seen >> 1
    repetition = jnp.where(seen > 0, repetition[:, None], 1.0)
    logits = jnp.where(logits > 0, logits / repetition, logits * repetition)
    subtracted = frequency[:, None] * count.astype(jnp.float32)
    return logits - (subtracted + presence[:, None] * (count > 0))
