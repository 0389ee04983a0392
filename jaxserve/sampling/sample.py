"""The two sampling programs: `greedy` and `general`."""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.core.steps.results import NO_TOKEN, TokenLogprobs
from jaxserve.models import parallel
from jaxserve.sampling import rows as row
from jaxserve.sampling.acceptance import AcceptanceRule, Drafted, decide
from jaxserve.sampling.branches import is_taken
from jaxserve.sampling.logits import add_bias, ban_tokens, mask_tokens, penalize, when
from jaxserve.sampling.logprobs import no_logprobs, token_logprobs
from jaxserve.sampling.noise import exponentials
from jaxserve.sampling.processors import NO_PROCESSORS, Processors, apply_processors
from jaxserve.sampling.state import SamplingState, record
from jaxserve.sampling.threshold import weight_floor
from jaxserve.sampling.vocabulary import largest, padded
from jaxserve.structured.bitmask import mask_words

_BEHIND = 1e3
"""How far tokens that filters leave out are behind those in a race, as logarithms."""


@flax.struct.dataclass
class SampleOutput:
    """`token_ids` int32 [rows], NO_TOKEN where sampling failed; logprobs zero if not asked for."""

    token_ids: jax.Array
    logprobs: TokenLogprobs[jax.Array]


def greedy(logits: jax.Array) -> jax.Array:
    """Most likely token int32 [rows], the lowest id on ties.

    `logits` float32 [rows, vocab], of this rank's part of the vocabulary.
    """
    best, place = largest(_whole_cells(logits))
    place = jnp.where(best > -jnp.inf, place, NO_TOKEN)
    return parallel.vocab_parallel_argmax(place, best, logits.shape[1])


def _whole_cells(logits: jax.Array) -> jax.Array:
    """Logits [rows, vocab] with -inf up to whole cells."""
    count = logits.shape[1]
    missing = ((0, 0), (0, padded(count) - count))
    return jnp.pad(logits, missing, constant_values=-jnp.inf)


def general(
    logits: jax.Array,
    state: SamplingState,
    meta: jax.Array,
    masks: jax.Array,
    processors: Processors = NO_PROCESSORS,
    drafts: jax.Array | None = None,
    rule: AcceptanceRule | None = None,
    drafted: Drafted | None = None,
) -> tuple[SampleOutput, SamplingState]:
    """Samples one token per row with all of SamplingParams.

    `logits` float32 [rows, vocab], of this rank's part of the vocabulary; `meta` int32
    [rows, NUM_FIELDS + processors] from `pack_rows`. `masks` int32
    [rows, mask_words] has a bit for each token of the whole vocabulary that a row with FLAG_MASK
    may sample; other rows of `masks` are not read. Returns the state with the tokens recorded where
    they are needed. A row's token depends only on its own logits, state, fields and mask.

    Real rows have distinct slots, but with `drafts` int32 [rows, n]: those of each row's slot, of
    which it comes after the first PLACE. Rows of one slot are neighbours, and those after a wrong
    draft are not recorded. By a `rule` the token of a row with FLAG_VERIFIES may be one that was
    `drafted` for it (`acceptance.decide`).
    """
    count = logits.shape[1]
    floats = lax.bitcast_convert_type(meta, jnp.float32)
    flags = meta[:, row.FLAGS]

    pending = _pending(meta, drafts)
    scores = _processed(logits, state, meta, floats, masks, processors, pending)
    best = parallel.max_over_vocab(jnp.max(scores, axis=1))
    kept = _kept_weights(scores, best, meta, floats)
    temperature = floats[:, row.TEMPERATURE]
    chance, place = largest(kept / _noise(meta, temperature, count, kept.shape[1]))
    place = jnp.where((best > -jnp.inf) & (chance > 0), place, NO_TOKEN)
    token_ids = parallel.vocab_parallel_argmax(place, chance, count)
    if rule is not None and drafted is not None:
        # The drafts of a slot may be old where its step verifies none of them.
        verifies = (flags & row.FLAG_VERIFIES > 0) & (temperature > 0)
        own = jnp.where(verifies[:, None], drafted.token_ids, NO_TOKEN)
        drafted = drafted._replace(token_ids=own)
        positions = meta[:, row.POSITION]
        token_ids = decide(rule, kept, token_ids, drafted, _seeds(meta), positions, count)

    logprobs = lax.cond(
        is_taken(_any(flags, row.FLAG_LOGPROBS)),
        lambda: token_logprobs(
            logits,
            token_ids,
            _any(flags, row.FLAG_TOP_LOGPROBS),
            meta[:, row.LISTED : row.NUM_FIELDS],
            flags & row.FLAG_LISTED_LOGPROBS > 0,
        ),
        lambda: no_logprobs(len(logits)),
    )
    state = record_sampled(state, meta, token_ids, count, drafts)
    return SampleOutput(token_ids=token_ids, logprobs=logprobs), state


def candidates(
    logits: jax.Array,
    state: SamplingState,
    meta: jax.Array,
    processors: Processors,
    num: int,
) -> tuple[jax.Array, jax.Array]:
    """The `num` tokens most likely to be what `general` samples, in that order, and how likely as
    logarithms: int32 and float32 [rows, num]; NO_TOKEN and -inf where there are fewer. `num` is at
    most CELL. Arguments as in `general`, without masks.

    Those that the race of `general` would let win, one after another; then, where a row is greedy
    or its filters leave fewer, the others by their scores.
    """
    count = logits.shape[1]
    floats, scores, best = _without_masks(logits, state, meta, processors, None)
    chances, distance = _chances(scores, best, meta, floats, count), scores - best[:, None]
    sampled = floats[:, row.TEMPERATURE, None] > 0
    after_all = distance - _BEHIND
    values = jnp.where(chances > 0, jnp.log(chances), after_all)
    return _largest_few(jnp.where(sampled, values, distance), num, count)


def distribution(
    logits: jax.Array,
    state: SamplingState,
    meta: jax.Array,
    processors: Processors,
    drafts: jax.Array | None = None,
) -> jax.Array:
    """Probabilities float32 [rows, padded vocab] that `general` samples from. Arguments as there,
    without masks."""
    floats, scores, best = _without_masks(logits, state, meta, processors, drafts)
    kept = _kept_weights(scores, best, meta, floats)
    return kept / parallel.sum_over_vocab(jnp.sum(kept, axis=1))[:, None]


def _without_masks(
    logits: jax.Array,
    state: SamplingState,
    meta: jax.Array,
    processors: Processors,
    drafts: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The float fields of `meta`, the scores of tokens, and the highest of each row."""
    floats = lax.bitcast_convert_type(meta, jnp.float32)
    masks = jnp.zeros((len(meta), mask_words(processors.vocab_size)), jnp.int32)
    scores = _processed(logits, state, meta, floats, masks, processors, _pending(meta, drafts))
    return floats, scores, parallel.max_over_vocab(jnp.max(scores, axis=1))


def most_likely(logits: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """As `candidates`, of greedy rows with raw logits."""
    return _largest_few(_whole_cells(logits), num, logits.shape[1])


def _largest_few(values: jax.Array, num: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Ids int32 [rows, num] of the largest values [rows, padded vocab] of all ranks, each of which
    has `count` tokens, and their log-softmax; NO_TOKEN and -inf for -inf and NaN."""
    peak = parallel.max_over_vocab(jnp.max(values, axis=1))
    total = parallel.sum_over_vocab(jnp.sum(jnp.exp(values - peak[:, None]), axis=1))
    values, ids = lax.top_k(values, num)
    if parallel.num_vocab_ranks() > 1:
        values = parallel.gather_over_vocab(values)
        ids = parallel.gather_over_vocab(parallel.first_of_vocab(count) + ids)
        values, places = lax.top_k(values, num)
        ids = jnp.take_along_axis(ids, places, axis=1)
    found = values > -jnp.inf
    logs = jnp.minimum(values - (peak + jnp.log(total))[:, None], 0.0)
    return jnp.where(found, ids, NO_TOKEN), jnp.where(found, logs, -jnp.inf)


def record_sampled(
    state: SamplingState,
    meta: jax.Array,
    token_ids: jax.Array,
    count: int,
    drafts: jax.Array | None,
    accepted: jax.Array | None = None,
) -> SamplingState:
    """State with the `token_ids` int32 [rows] that are accepted, where they are needed; the
    arguments are those of `general`, and each rank has `count` tokens of the vocabulary. `accepted`
    bool [rows] says which those are where drafts are trees."""
    tracked = meta[:, row.FLAGS] & row.FLAG_TRACK > 0
    if accepted is not None:
        tracked &= accepted
    elif drafts is not None:
        tracked &= _accepted(meta[:, row.PLACE], drafts, token_ids)
    depths = None if accepted is None else meta[:, row.PLACE]
    pending = _pending(meta, drafts)
    return record(state, meta[:, row.SLOT], token_ids, count, tracked, pending, depths)


def _pending(meta: jax.Array, drafts: jax.Array | None) -> jax.Array | None:
    """Drafts int32 [rows, n] that come before each row, NO_TOKEN after the last of them."""
    if drafts is None:
        return None
    before = jnp.arange(drafts.shape[1]) < meta[:, row.PLACE, None]
    return jnp.where(before, drafts, NO_TOKEN)


def _accepted(places: jax.Array, drafts: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Whether all drafts before each row were sampled in the rows before it, bool [rows]."""
    accepted = places == 0
    for place in range(drafts.shape[1]):
        right = accepted & (places == place) & (token_ids >= 0) & (token_ids == drafts[:, place])
        accepted |= jnp.roll(right, 1) & (places == place + 1)
    return accepted


def _any(flags: jax.Array, flag: int) -> jax.Array:
    return jnp.any(flags & flag > 0)


def _processed(
    logits: jax.Array,
    state: SamplingState,
    meta: jax.Array,
    floats: jax.Array,
    masks: jax.Array,
    processors: Processors,
    pending: jax.Array | None,
) -> jax.Array:
    """Scores [rows, padded vocab]: logits with mask, bias, bans, processors and penalties; -inf in
    the padding.
    """
    count = logits.shape[1]
    slots, flags = meta[:, row.SLOT], meta[:, row.FLAGS]
    scores = _whole_cells(logits)
    biased = flags & row.FLAG_BIAS > 0
    early = meta[:, row.POSITION] < meta[:, row.MIN_TOKENS]
    worded = flags & row.FLAG_BAD_WORDS > 0
    masked = flags & row.FLAG_MASK > 0
    penalties = [floats[:, field] for field in (row.PRESENCE, row.FREQUENCY, row.REPETITION)]
    mask = functools.partial(mask_tokens, masked=masked, count=count)
    scores = when(jnp.any(masked), mask, scores, masks)
    stages = (
        (jnp.any(biased), functools.partial(add_bias, biased=biased)),
        (
            jnp.any(early | worded),
            functools.partial(
                ban_tokens,
                before_min_tokens=early,
                with_bad_words=worded,
                pending=pending,
                count=count,
            ),
        ),
    )
    for wanted, stage in stages:
        scores = when(wanted, functools.partial(stage, state=state), scores, slots)
    if processors.functions:
        stage = functools.partial(apply_processors, processors=processors, count=count)
        numbers = jnp.where(
            (flags & row.FLAG_PROCESSORS > 0)[:, None], floats[:, row.NUM_FIELDS :], jnp.nan
        )
        scores = when(_any(flags, row.FLAG_PROCESSORS), stage, scores, numbers)
    stage = functools.partial(
        penalize, state=state, penalties=penalties, pending=pending, vocab=count
    )
    return when(_any(flags, row.FLAG_PENALTY), stage, scores, slots)


def _chances(
    scores: jax.Array, best: jax.Array, meta: jax.Array, floats: jax.Array, count: int
) -> jax.Array:
    """How each token does in the race of a row [rows, padded vocab], 0 where filters leave it out;
    the largest is sampled."""
    kept = _kept_weights(scores, best, meta, floats)
    return kept / _noise(meta, floats[:, row.TEMPERATURE], count, kept.shape[1])


def _kept_weights(
    scores: jax.Array, best: jax.Array, meta: jax.Array, floats: jax.Array
) -> jax.Array:
    """The weight of each token [rows, padded vocab], 0 where filters leave it out."""
    weights = _weights(scores, best, floats[:, row.TEMPERATURE])
    floor = weight_floor(weights, meta[:, row.TOP_K], floats[:, row.TOP_P], floats[:, row.MIN_P])
    return jnp.where(weights >= floor[:, None], weights, 0.0)


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


def _noise(meta: jax.Array, temperature: jax.Array, count: int, width: int) -> jax.Array:
    """Divisor of each token's weight [rows, width]; 1 for greedy rows."""
    token_ids = parallel.first_of_vocab(count) + jnp.arange(width, dtype=jnp.int32)
    noise = exponentials(_seeds(meta), meta[:, row.POSITION], token_ids)
    return jnp.where(temperature[:, None] > 0, noise, 1.0)


def _seeds(meta: jax.Array) -> jax.Array:
    """The words of each row's seed, uint32 [rows, 2]."""
    return lax.bitcast_convert_type(meta[:, row.SEED_HIGH : row.SEED_LOW + 1], jnp.uint32)
