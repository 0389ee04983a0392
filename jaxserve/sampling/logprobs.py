"""Log probabilities of the raw distribution: given tokens, their ranks, and the top tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.core.requests.sampling_params import MAX_LOGPROBS as TOP_LOGPROBS
from jaxserve.core.steps.results import TokenLogprobs
from jaxserve.models import parallel
from jaxserve.sampling.branches import is_taken
from jaxserve.sampling.vocabulary import largest_few, ordered_sum


def no_logprobs(rows: int) -> TokenLogprobs[jax.Array]:
    """Zeros, for rows that did not request logprobs."""
    return TokenLogprobs(
        logprobs=jnp.zeros((rows,), jnp.float32),
        ranks=jnp.zeros((rows,), jnp.int32),
        top_ids=jnp.zeros((rows, TOP_LOGPROBS), jnp.int32),
        top_logprobs=jnp.zeros((rows, TOP_LOGPROBS), jnp.float32),
    )


def token_logprobs(
    logits: jax.Array,
    token_ids: jax.Array,
    with_top: jax.Array,
    listed_ids: jax.Array | None = None,
    listed: jax.Array | None = None,
) -> TokenLogprobs[jax.Array]:
    """Logprobs of `token_ids` [rows] from raw `logits` [rows, vocab], this rank's part of the
    vocabulary; also the top ones if the scalar `with_top` is set. Rows with `listed` bool [rows]
    have those of their `listed_ids` int32 [rows, 20] in the place of the top ones.

    With a vocabulary smaller than 20, the remaining top entries are -inf.
    """
    rows, count = logits.shape
    first = parallel.first_of_vocab(count)
    best = parallel.max_over_vocab(jnp.max(logits, axis=1))
    normalizer = best + jnp.log(
        parallel.sum_over_vocab(ordered_sum(jnp.exp(logits - best[:, None])))
    )
    # A row that sampled no token has a negative id; its logprob is not used.
    place = jnp.maximum(token_ids, 0) - first
    here = (place >= 0) & (place < count)
    own = logits.at[jnp.arange(rows), jnp.clip(place, 0, count - 1)].get()
    chosen = parallel.sum_over_vocab(jnp.where(here, own, 0.0))
    higher = ordered_sum((logits > chosen[:, None]).astype(jnp.int32))

    def top() -> tuple[jax.Array, jax.Array]:
        values, ids = largest_few(logits, min(TOP_LOGPROBS, count))
        if parallel.num_vocab_ranks() > 1:
            values = parallel.gather_over_vocab(values)
            ids = parallel.gather_over_vocab(first + ids)
            values, best_of_ranks = lax.top_k(values, min(TOP_LOGPROBS, values.shape[1]))
            ids = jnp.take_along_axis(ids, best_of_ranks, axis=1)
        missing = ((0, 0), (0, TOP_LOGPROBS - ids.shape[1]))
        values = jnp.pad(values - normalizer[:, None], missing, constant_values=-jnp.inf)
        return jnp.pad(ids, missing), values

    empty = no_logprobs(rows)
    top_ids, top_values = lax.cond(
        is_taken(with_top), top, lambda: (empty.top_ids, empty.top_logprobs)
    )
    if listed_ids is not None:
        place = listed_ids - first
        here = (place >= 0) & (place < count)
        own = jnp.take_along_axis(logits, jnp.clip(place, 0, count - 1), axis=1)
        values = parallel.sum_over_vocab(jnp.where(here, own, 0.0)) - normalizer[:, None]
        top_ids = jnp.where(listed[:, None], listed_ids, top_ids)
        top_values = jnp.where(listed[:, None], values, top_values)
    return TokenLogprobs(
        logprobs=chosen - normalizer,
        ranks=1 + parallel.sum_over_vocab(higher),
        top_ids=top_ids,
        top_logprobs=top_values,
    )
