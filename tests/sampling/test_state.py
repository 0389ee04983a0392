from __future__ import annotations

import jax
import numpy as np
import pytest
from sampling_reference import empty_state

from jaxserve.core.errors import RequestError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.sampling import admit, needs_state, pack_admission
from jaxserve.sampling.state import record

VOCAB, SLOTS = 100, 3
run_admit = jax.jit(admit)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5, "seed": 1, "logprobs": 5}, False),
        ({"presence_penalty": -1.0}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"repetition_penalty": 0.9}, True),
        ({"logit_bias": {1: 1.0}}, True),
        ({"allowed_token_ids": [1]}, True),
        ({"bad_words": ["x"]}, True),
        ({"min_tokens": 1}, True),
    ],
)
def test_only_some_params_need_state(fields, expected):
    assert needs_state(SamplingParams(**fields)) is expected


def test_admission_replaces_one_slot_and_no_other():
    params = SamplingParams(allowed_token_ids=[1, 2], logit_bias={2: 5.0}, stop_token_ids=[9])
    state = empty_state(SLOTS, VOCAB)
    first = pack_admission(params, VOCAB, range(50), [7] * 20, bad_word_ids=[(1,), (4, 5, 6)])
    state = run_admit(state, 1, first)
    second = pack_admission(
        params, VOCAB, [0, 0, 3], [3, 3, 8], eos_token_ids=[4], bad_word_ids=[(1,), (5, 6)]
    )
    state = jax.tree.map(np.asarray, run_admit(state, 1, second))

    assert {i: v for i, v in enumerate(state.seen[1]) if v} == {0: 1, 3: 1 + 2 * 2, 8: 2}
    assert state.bias[1, :4].tolist() == [-np.inf, -np.inf, 5.0, -np.inf]
    assert state.recent[1].tolist() == [-1, -1, -1, -1, 3, 3, 8]
    assert state.bad_words[1, 0].tolist() == [-1] * 6 + [5, 6]
    assert (state.bad_words[1, 1:] == -1).all()
    assert state.stop_ids[1, :3].tolist() == [4, 9, -1]
    for leaf in jax.tree.leaves(state):
        assert not leaf[[0, 2, 3]].any()


def test_recording_skips_rows_that_are_not_tracked_or_sampled_nothing():
    state = record(
        empty_state(SLOTS, VOCAB),
        np.array([0, 1, 2, 3], np.int32),
        np.array([5, 6, -1, 8], np.int32),
        VOCAB,
        np.array([True, False, True, False]),
    )
    seen = np.asarray(state.seen)
    assert seen[0, 5] == 2 and seen[:SLOTS].sum() == 2
    assert state.recent[0, -1] == 5 and not np.asarray(state.recent)[1:SLOTS].any()


@pytest.mark.parametrize(
    ("bad_word_ids", "words"),
    [
        ([tuple(range(9))], "has 9 tokens"),
        ([()], "has 0 tokens"),
        ([(1,)] * 65, "65 token sequences"),
        ([(1, VOCAB)], "0..99"),
    ],
)
def test_unusable_bad_words_are_refused(bad_word_ids, words):
    with pytest.raises(RequestError, match=words):
        pack_admission(SamplingParams(), VOCAB, [1], bad_word_ids=bad_word_ids)


def test_ids_outside_the_vocabulary_are_refused():
    with pytest.raises(RequestError, match="logit_bias"):
        pack_admission(SamplingParams(logit_bias={VOCAB: 1.0}), VOCAB, [1])
    with pytest.raises(RequestError, match="81 token ids"):
        pack_admission(SamplingParams(), VOCAB, [1], eos_token_ids=range(81))
