"""Per-sequence sampling state on the device, by slot: history and options.

Only sequences that need it (`needs_state`) are admitted; the rows of the others are never read.
On a mesh each rank has the columns of its part of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.errors import RequestError
from jaxserve.core.requests.sampling_params import MAX_BAD_WORDS, MAX_STOP_TOKEN_IDS, SamplingParams
from jaxserve.models import parallel
from jaxserve.sampling.vocabulary import padded

MAX_BAD_WORD_TOKENS = 8
MAX_BAD_SEQUENCES = 2 * MAX_BAD_WORDS  # each word with and without a leading space
MAX_BANNED_STOPS = MAX_STOP_TOKEN_IDS + 16  # a request's own stop ids and the model's
_RECENT = MAX_BAD_WORD_TOKENS - 1
_NONE = -1

BY_TOKEN = ("seen", "bias")
"""Fields of the state with a column for each token of the vocabulary."""


@flax.struct.dataclass
class SamplingState:
    """Per-sequence arrays, one row per slot; the last row is the trash slot of padded rows.

    Columns of the vocabulary are padded to whole cells on each rank, like the logits.
    `seen` int32 [slots + 1, vocab]: bit 0 is set if the prompt has the token, the bits above
    count it in the output. `bias` float32 [slots + 1, vocab] is added to the logits, -inf where a
    token is never allowed. `recent` int32 [slots + 1, 7] holds the last output tokens, newest
    last. `bad_words` int32 [slots + 1, 64, 8] are banned sequences, aligned right.
    `stop_ids` int32 [slots + 1, 64] are banned until min_tokens. -1 marks an unused entry.
    """

    seen: jax.Array
    bias: jax.Array
    recent: jax.Array
    bad_words: jax.Array
    stop_ids: jax.Array

    @property
    def trash_slot(self) -> int:
        return self.seen.shape[0] - 1


def needs_state(params: SamplingParams) -> bool:
    """Whether a sequence with these params must be admitted to a slot before it is sampled."""
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
        or params.min_tokens
    )


def abstract_state(num_slots: int, vocab_size: int, ranks: int = 1) -> SamplingState:
    """Shapes of the state of `num_slots` empty slots and the trash slot, whose row index is
    `num_slots`, for a vocabulary that is split over `ranks`. The initial state is zeros."""
    rows, width = num_slots + 1, ranks * padded(tokens_per_rank(vocab_size, ranks))
    return SamplingState(
        seen=jax.ShapeDtypeStruct((rows, width), jnp.int32),
        bias=jax.ShapeDtypeStruct((rows, width), jnp.float32),
        recent=jax.ShapeDtypeStruct((rows, _RECENT), jnp.int32),
        bad_words=jax.ShapeDtypeStruct((rows, MAX_BAD_SEQUENCES, MAX_BAD_WORD_TOKENS), jnp.int32),
        stop_ids=jax.ShapeDtypeStruct((rows, MAX_BANNED_STOPS), jnp.int32),
    )


def tokens_per_rank(vocab_size: int, ranks: int) -> int:
    """Tokens of the vocabulary per rank, of which the last ranks may have fewer."""
    return cdiv(vocab_size, ranks)


def _columns(by_token: np.ndarray, ranks: int) -> np.ndarray:
    """Per-token values int32 [vocab] in the order and with the padding of the state."""
    count = tokens_per_rank(len(by_token), ranks)
    parts = np.zeros((ranks, padded(count)), by_token.dtype)
    whole = np.zeros(ranks * count, by_token.dtype)
    whole[: len(by_token)] = by_token
    parts[:, :count] = whole.reshape(ranks, count)
    return parts.ravel()


def pack_admission(
    params: SamplingParams,
    vocab_size: int,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int] = (),
    *,
    eos_token_ids: Sequence[int] = (),
    bad_word_ids: Sequence[Sequence[int]] = (),
    ranks: int = 1,
) -> np.ndarray:
    """One sequence's rows of every state array, end to end as int32, for `admit`.

    `output_token_ids` are all tokens that a resumed sequence has generated. `bad_word_ids` are the
    tokenizations of `params.bad_words`; `eos_token_ids` those that would end this sequence. `ranks`
    as in `abstract_state`. Raises RequestError when a bad word is too long, there are too many
    words or stop ids, or an id is outside the vocabulary.
    """
    params.check_vocabulary(vocab_size)
    _check_bad_words(bad_word_ids, vocab_size)

    seen = 2 * np.bincount(np.asarray(output_token_ids, np.int32), minlength=vocab_size)
    seen[np.asarray(prompt_token_ids, np.int32)] |= 1

    bias = np.zeros(vocab_size, np.float32)
    if params.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[list(params.allowed_token_ids)] = 0.0
    for token, value in (params.logit_bias or {}).items():
        bias[token] += value
    bias[[word[0] for word in bad_word_ids if len(word) == 1]] = -np.inf

    recent = np.full(_RECENT, _NONE, np.int32)
    last = np.asarray(output_token_ids[-_RECENT:], np.int32)
    recent[_RECENT - len(last) :] = last

    bad_words = np.full((MAX_BAD_SEQUENCES, MAX_BAD_WORD_TOKENS), _NONE, np.int32)
    for row, word in zip(bad_words, (word for word in bad_word_ids if len(word) > 1)):
        row[MAX_BAD_WORD_TOKENS - len(word) :] = word

    stop_ids = np.full(MAX_BANNED_STOPS, _NONE, np.int32)
    stops = sorted({*eos_token_ids, *params.stop_token_ids})
    if len(stops) > MAX_BANNED_STOPS:
        raise RequestError(
            f"{len(stops)} token ids can end this request; at most {MAX_BANNED_STOPS} are allowed."
        )
    stop_ids[: len(stops)] = stops
    by_token = (_columns(array, ranks) for array in (seen.astype(np.int32), bias.view(np.int32)))
    return np.concatenate([*by_token, recent, bad_words.ravel(), stop_ids])


def _check_bad_words(bad_word_ids: Sequence[Sequence[int]], vocab_size: int) -> None:
    if len(bad_word_ids) > MAX_BAD_SEQUENCES:
        raise RequestError(
            f"bad_words makes {len(bad_word_ids)} token sequences; "
            f"at most {MAX_BAD_SEQUENCES} are allowed."
        )
    for word in bad_word_ids:
        if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            raise RequestError(
                f"a word of bad_words has {len(word)} tokens; "
                f"it must have 1..{MAX_BAD_WORD_TOKENS}, so shorten or split it."
            )
        if not all(0 <= token < vocab_size for token in word):
            raise RequestError(
                f"bad_words has the tokens {list(word)}, but this model's ids are "
                f"0..{vocab_size - 1}."
            )


def admit(state: SamplingState, slot: jax.Array, admission: jax.Array) -> SamplingState:
    """State with every array's row `slot` (int32 scalar) replaced by a packed `admission`.

    One shape serves prompts and outputs of any length. The state should be donated.
    """
    ranks = parallel.num_vocab_ranks()
    rows = []
    start = 0
    for field in dataclasses.fields(state):
        array = getattr(state, field.name)
        size, of_all = array[0].size, ranks if field.name in BY_TOKEN else 1
        # Every rank receives all columns and takes its own.
        own = start + parallel.first_of_vocab(size) if of_all > 1 else start
        row = lax.dynamic_slice_in_dim(admission, own, size).reshape(array.shape[1:])
        start += of_all * size
        rows.append(lax.bitcast_convert_type(row, array.dtype))
    return jax.tree.map(
        lambda array, row: lax.dynamic_update_index_in_dim(array, row, slot, 0),
        state,
        jax.tree.unflatten(jax.tree.structure(state), rows),
    )


def recent_tokens(state: SamplingState, slots: jax.Array, pending: jax.Array | None) -> jax.Array:
    """The last output tokens int32 [rows, 7] before those that rows sample, newest last.

    `pending` int32 [rows, n] are tokens that follow those of the state, -1 after the last of them;
    None for none.
    """
    recent = state.recent[slots]
    if pending is None:
        return recent
    number = jnp.sum(pending >= 0, axis=1, keepdims=True)
    both = jnp.concatenate([recent, pending], axis=1)
    return jnp.take_along_axis(both, number + jnp.arange(_RECENT), axis=1)


def record(
    state: SamplingState,
    slots: jax.Array,
    token_ids: jax.Array,
    count: int,
    tracked: jax.Array,
    pending: jax.Array | None = None,
    depths: jax.Array | None = None,
) -> SamplingState:
    """State after the rows with `tracked` bool [rows] appended `token_ids` int32 [rows]; each rank
    has `count` tokens of the vocabulary.

    The other rows write to the trash slot, and so do rows that sampled no token (a negative id).
    Rows of one slot are neighbours, in order or with `depths` int32 [rows] that order them;
    `pending` as in `recent_tokens` has for each the tokens of those before it.
    """
    real = tracked & (token_ids >= 0)
    tokens = jnp.maximum(token_ids, 0)
    shifted = recent_tokens(state, slots, pending)
    shifted = jnp.concatenate([shifted[:, 1:], tokens[:, None]], axis=1)
    place = tokens - parallel.first_of_vocab(count)
    place = jnp.where((place >= 0) & (place < count), place, state.seen.shape[1])
    if depths is None:
        followed = jnp.append(real[1:] & (slots[1:] == slots[:-1]), False)
    else:
        deepest = jnp.zeros(len(state.seen), jnp.int32).at[slots].max(jnp.where(real, depths, 0))
        followed = depths < deepest[slots]
    seen = jnp.where(real, slots, state.trash_slot)
    newest = jnp.where(real & ~followed, slots, state.trash_slot)
    return state.replace(
        seen=state.seen.at[seen, place].add(2, mode="drop"),
        recent=state.recent.at[newest].set(shifted),
    )
