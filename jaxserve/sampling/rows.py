"""The upload of a sampling step: an int32 array [rows, NUM_FIELDS].

The fields below are its columns; floats are stored as their bits. Everything but SLOT, POSITION and
PLACE is constant for a sequence, so it is built once (`row_constants`) and copied each step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxserve.core.requests.sampling_params import MAX_LOGPROBS, SamplingParams

SLOT = 0  # row of the per-sequence state; padded rows use the trash slot, the last one
POSITION = 1  # output tokens sampled before this one, read by the host or not
SEED_HIGH = 2
SEED_LOW = 3
FLAGS = 4
TOP_K = 5  # 0 is off
MIN_TOKENS = 6
PLACE = 7  # drafts of its step before it
TEMPERATURE = 8  # float bits from here on; 0.0 is greedy
TOP_P = 9  # 1.0 is off
MIN_P = 10
PRESENCE = 11
FREQUENCY = 12
REPETITION = 13
LISTED = 14  # token ids of FLAG_LISTED_LOGPROBS from here on, as integers again
NUM_FIELDS = LISTED + MAX_LOGPROBS  # and then a float for each of the engine's logits processors

FLAG_BIAS = 1  # adds its slot's bias row
FLAG_PENALTY = 2
FLAG_BAD_WORDS = 4  # has bad words of several tokens
FLAG_TRACK = 8  # sampled tokens are recorded in its slot
FLAG_LOGPROBS = 16  # needs the sampled token's logprob and rank
FLAG_TOP_LOGPROBS = 32  # and the most likely tokens
FLAG_MASK = 64  # samples only what its row of the step's masks allows
FLAG_PROCESSORS = 128  # applies the logits processors whose fields are not NaN
FLAG_LISTED_LOGPROBS = 256  # needs logprobs of its listed tokens, instead of the most likely ones
FLAG_VERIFIES = 512  # its step verifies the draft at PLACE, which comes after it


def row_constants(
    params: SamplingParams,
    seed: int,
    *,
    multi_token_bad_words: bool = False,
    processors: Sequence[str] = (),
) -> np.ndarray:
    """The constant row of a sequence, int32 [NUM_FIELDS + processors], with SLOT and POSITION zero.

    `seed` is the sequence's own (see `sequence_seed`); the engine draws one for requests without.
    `multi_token_bad_words` says whether tokenizing `params.bad_words` gave any sequence of more
    than one token. `processors` are the names of the engine's logits processors.
    """
    penalty = (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
    )
    bias = bool(params.logit_bias or params.allowed_token_ids or params.bad_words)
    flags = (
        FLAG_BIAS * bias
        | FLAG_PENALTY * penalty
        | FLAG_BAD_WORDS * multi_token_bad_words
        | FLAG_TRACK * (penalty or multi_token_bad_words)
        | FLAG_LOGPROBS * (params.logprobs is not None)
        | FLAG_TOP_LOGPROBS * bool(params.logprobs and params.logprob_token_ids is None)
        | FLAG_LISTED_LOGPROBS * (params.logprob_token_ids is not None)
        | FLAG_MASK * params.masked
        | FLAG_PROCESSORS * bool(params.extra_args)
    )
    row = np.zeros(NUM_FIELDS + len(processors), np.int32)
    row[[SEED_HIGH, SEED_LOW]] = np.array(
        [seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32
    ).view(np.int32)
    row[FLAGS] = flags
    row[MIN_TOKENS] = params.min_tokens
    listed = params.logprob_token_ids or ()
    row[LISTED : LISTED + len(listed)] = listed
    floats = row.view(np.float32)
    floats[[PRESENCE, FREQUENCY, REPETITION]] = (
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
    )
    floats[TOP_P] = 1.0
    floats[NUM_FIELDS:] = [(params.extra_args or {}).get(name, np.nan) for name in processors]
    if not params.greedy:  # a greedy row keeps its filters off: they cannot change the maximum
        row[TOP_K] = max(params.top_k, 0)
        floats[[TEMPERATURE, TOP_P, MIN_P]] = params.temperature, params.top_p, params.min_p
    return row


def pack_rows(
    constants: Sequence[np.ndarray],
    slots: Sequence[int] | np.ndarray,
    positions: Sequence[int] | np.ndarray,
    bucket: int,
    trash_slot: int,
    num_processors: int = 0,
) -> np.ndarray:
    """The upload of one step, int32 [bucket, NUM_FIELDS + num_processors].

    Row i samples for the sequence with `constants[i]`, `slots[i]` (`trash_slot` if it has none)
    and `positions[i]`. Rows past `len(constants)` are padding: greedy, in the trash slot.
    """
    rows = np.zeros((bucket, NUM_FIELDS + num_processors), np.int32)
    rows[:, SLOT] = trash_slot
    count = len(constants)
    if count:
        np.stack(constants, out=rows[:count])
        rows[:count, SLOT] = slots
        rows[:count, POSITION] = positions
    padding = rows[count:].view(np.float32)
    padding[:, [TOP_P, REPETITION]] = 1.0
    return rows
