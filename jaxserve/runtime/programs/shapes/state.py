"""Shapes of what devices hold for each sequence: the states of sampling and of speculation."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from jaxserve.core.settings.config import EngineConfig
from jaxserve.models.parallel import VOCAB
from jaxserve.runtime.hardware.arrays import ArrayShapes, placed
from jaxserve.sampling import BY_TOKEN, SamplingState, abstract_state, tokens_per_rank
from jaxserve.sampling.speculation import SpeculationState, abstract_speculation
from jaxserve.sampling.vocabulary import padded


def sampling_shapes(
    arrays: ArrayShapes, num_slots: int, vocab_size: int, vocab_ranks: int
) -> SamplingState:
    """The state of sampling of `num_slots` sequences, with a vocabulary split over ranks."""
    state = abstract_state(num_slots, vocab_size, vocab_ranks)

    def sharding(name: str) -> Sharding:
        return arrays.sharding(*((None, VOCAB) if name in BY_TOKEN else ()))

    names = [field.name for field in dataclasses.fields(state)]
    return SamplingState(**{name: placed(getattr(state, name), sharding(name)) for name in names})


def speculation_shapes(
    arrays: ArrayShapes,
    config: EngineConfig,
    vocab_size: int,
    vocab_ranks: int,
    hidden: jax.ShapeDtypeStruct | None,
    *,
    gained: bool,
) -> SpeculationState | None:
    """The state of speculation of all sequences; None without speculation. `hidden` and `gained`
    are as for `abstract_speculation`."""
    num_drafts, num_slots = config.num_speculative_tokens, config.max_num_seqs
    if not num_drafts:
        return None
    speculative = config.speculative_config
    state = abstract_speculation(
        num_slots,
        config.max_model_len,
        num_drafts,
        hidden,
        gained=gained,
        tree_depth=speculative.tree_depth,
        ngram_size=speculative.max_ngram_size,
    )
    state = jax.tree.map(lambda array: placed(array, arrays.sharding()), state)
    if speculative.keeps_probabilities:
        width = vocab_ranks * padded(tokens_per_rank(vocab_size, vocab_ranks))
        drawn = num_slots + 1, speculative.tree_depth or num_drafts, width
        probs = jax.ShapeDtypeStruct(drawn, jnp.float32)
        state = state._replace(probs=placed(probs, arrays.sharding(None, None, VOCAB)))
    return state
