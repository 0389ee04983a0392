"""Scores of prompt tokens, block by block."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
import sampling_reference as reference

from jaxserve.models.registry import get_family
from jaxserve.runtime.programs import prompt_programs

VOCAB, FEATURES = 300, 8
FAMILY = dataclasses.replace(
    get_family("LlamaForCausalLM"), logits=lambda embed, config, hidden: hidden @ embed.T
)
ROOM = 70
prompt_logprobs = functools.partial(prompt_programs.prompt_logprobs, FAMILY, None)
score = jax.jit(prompt_logprobs, static_argnums=0)


@pytest.mark.parametrize("tile", [None, 16])
@pytest.mark.parametrize("tokens", [1, 31, 32, 70])
def test_every_position_is_scored_under_its_own_logits(tokens, tile):
    rng = np.random.default_rng(tokens)
    embed = rng.normal(size=(VOCAB, FEATURES)).astype(np.float32)
    hidden = rng.normal(size=(ROOM, FEATURES)).astype(np.float32)
    hidden[tokens:] = np.nan
    targets = rng.integers(0, VOCAB, ROOM).astype(np.int32)
    scored = jax.tree.map(np.asarray, score(tile, embed, hidden, targets, np.int32(tokens)))
    logits = hidden @ embed.T
    assert scored.top_ids.shape == (ROOM, 20)
    for i in range(tokens):
        expected = reference.log_softmax(logits[i])
        np.testing.assert_allclose(scored.logprobs[i], expected[targets[i]], atol=2e-5)
        # Logits of another matmul may swap neighbours that differ by rounding.
        higher = (expected > expected[targets[i]] + 1e-5).sum()
        not_lower = (expected >= expected[targets[i]] - 1e-5).sum()
        assert higher < scored.ranks[i] <= not_lower
        np.testing.assert_allclose(scored.top_logprobs[i], np.sort(expected)[::-1][:20], atol=2e-5)
        np.testing.assert_allclose(expected[scored.top_ids[i]], scored.top_logprobs[i], atol=2e-5)


def test_the_whole_logits_are_never_materialized():
    tokens, vocab = 1024, 4096
    embed = np.zeros((vocab, FEATURES), np.float32)
    hidden, targets = np.zeros((tokens, FEATURES), np.float32), np.zeros(tokens, np.int32)
    lowered = score.lower(None, embed, hidden, targets, np.int32(tokens))
    temporaries = lowered.compile().memory_analysis().temp_size_in_bytes
    assert temporaries < vocab * tokens * 4 / 4


@pytest.mark.parametrize("count", [5, 512, 1100])
def test_sums_of_chunks_over_several_tiles(count):
    room, num_chunks = 1200, 3
    rng = np.random.default_rng(count)
    hidden = rng.normal(size=(room, FEATURES)).astype(np.float32)
    chunks = np.sort(rng.integers(0, num_chunks, room)).astype(np.int32)
    hidden[count:] = np.nan
    sums = jax.jit(prompt_programs.sum_chunks, static_argnums=0)(
        num_chunks, hidden, chunks, np.int32(count)
    )
    own = chunks[:count]
    expected = [hidden[:count][own == chunk].sum(axis=0) for chunk in range(num_chunks)]
    np.testing.assert_allclose(sums, expected, atol=1e-3)
