"""Long prompts on eight devices: answers that are known by construction, in bounded memory."""

from __future__ import annotations

import dataclasses
import os

import long_context
import numpy as np
import oracle
import pytest
from exhaustive import EXHAUSTIVE
from induction_model import VOCAB, code_words, write_induction_model
from scripts import on_eight_devices
from tiny_engines import TinyModel

MIB = 1 << 20


def test_tokens_are_as_different_as_the_model_needs():
    products = code_words() @ code_words().T
    assert (np.diag(products) == 24).all()
    assert products[~np.eye(VOCAB, dtype=bool)].max() == 8


@pytest.mark.parametrize("hops", [1, 2])
def test_the_model_recalls_what_last_followed_by_its_long_factors(tmp_path, hops):
    """With the short factors of the same config, it recalls nothing."""
    model = TinyModel.open(write_induction_model(tmp_path, 4352, hops))
    hay, needles = long_context.haystack(2048, hops)
    short = dataclasses.replace(model.config.rope, long_factor=model.config.rope.short_factor)
    of_short = dataclasses.replace(model.config, rope=short)
    for needle in needles[::3]:
        tokens = np.array([*hay, needle.key, *needle.answer[:-1]], np.int32)
        answers = []
        for config in (model.config, of_short):
            logits = oracle.dense_logits(model.family, model.params, config, tokens)
            answers.append(logits[len(hay) :].argmax(axis=1).tolist())
        assert answers[0] == needle.answer
        assert not set(answers[1]) & set(needle.answer)


@pytest.mark.meshes
@on_eight_devices
def test_a_long_context_by_eight_shares_of_each_sequence():
    os.environ.pop("XLA_FLAGS", None)  # It runs for longer than it compiles.
    num_tokens = 131_072 if EXHAUSTIVE else 16_384
    done = long_context.run(num_tokens, num_tokens // 4, 1024, seq=8, tensor=1, stage=1)
    _check(done, num_tokens)


@pytest.mark.meshes
@on_eight_devices
def test_a_mesh_of_three_axes_finds_what_takes_two_hops():
    done = long_context.run(8192, 2048, 32, seq=2, tensor=2, stage=2)
    _check(done, 8192)


def _check(done: long_context.Run, num_tokens: int) -> None:
    for answer in done.answers:
        assert answer.tokens == answer.needle.answer
    first, *others = (answer.cached_tokens for answer in done.answers)
    memory = done.memory
    page_size = memory.layout.page_size
    assert first == 0
    # The model's layers have windows, where a hit is of whole pages.
    assert set(others) == {(num_tokens - 1) // page_size * page_size}
    assert memory.num_pages > memory.layout.pages_for(num_tokens)
    assert done.held_bytes == [memory.kv_bytes] * 8
    assert memory.kv_bytes * 8 == memory.num_pages * memory.whole_page_bytes
    taken = [progress.rss_bytes for progress in done.progress[1:]]
    assert taken[-1] - taken[0] < 64 * MIB
