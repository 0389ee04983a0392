from __future__ import annotations

import numpy as np

from jaxserve.core.requests.sampling_params import SamplingParams, sequence_seed
from jaxserve.sampling import pack_rows, row_constants
from jaxserve.sampling import rows as row


def test_rows_carry_every_field():
    params = SamplingParams(
        temperature=0.7,
        top_k=9,
        top_p=0.8,
        min_p=0.1,
        presence_penalty=-1.0,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        min_tokens=4,
        logprobs=5,
    )
    packed = pack_rows([row_constants(params, 2**33 + 7)], [2], [11], 1, 8)
    assert packed.shape == (1, row.NUM_FIELDS) and packed.dtype == np.int32
    first, floats = packed[0], packed.view(np.float32)[0]
    assert (first[row.SLOT], first[row.POSITION]) == (2, 11)
    assert (first[row.SEED_HIGH], first[row.SEED_LOW]) == (2, 7)
    assert (first[row.TOP_K], first[row.MIN_TOKENS]) == (9, 4)
    assert first[row.FLAGS] == (
        row.FLAG_PENALTY | row.FLAG_TRACK | row.FLAG_LOGPROBS | row.FLAG_TOP_LOGPROBS
    )
    np.testing.assert_allclose(
        floats[[row.TEMPERATURE, row.TOP_P, row.MIN_P]], [0.7, 0.8, 0.1], rtol=1e-6
    )
    np.testing.assert_allclose(
        floats[[row.PRESENCE, row.FREQUENCY, row.REPETITION]], [-1.0, 0.5, 1.2], rtol=1e-6
    )


def test_greedy_rows_turn_their_filters_off():
    params = SamplingParams(temperature=9e-6, top_k=3, top_p=0.1, min_p=0.9)
    constant = row_constants(params, 0)
    floats = constant.view(np.float32)
    assert constant[row.TOP_K] == 0
    assert floats[[row.TEMPERATURE, row.TOP_P, row.MIN_P]].tolist() == [0.0, 1.0, 0.0]


def test_padding_asks_for_nothing_in_the_trash_slot():
    packed = pack_rows([], [], [], 3, 8)
    constant = row_constants(SamplingParams(temperature=0.0), 0)
    constant[row.SLOT] = 8
    np.testing.assert_array_equal(packed, np.stack([constant] * 3))


def test_sequences_of_a_request_have_seeds_of_their_own():
    assert all(sequence_seed(seed, 0) == seed for seed in (-(2**63), -1, 0, 7, 2**63 - 1))
    seeds = {sequence_seed(seed, index) for seed in range(-100, 100) for index in range(64)}
    assert len(seeds) == 200 * 64 and all(-(2**63) <= seed < 2**63 for seed in seeds)
    largest = row_constants(SamplingParams(), 2**64 - 1)
    assert largest[[row.SEED_HIGH, row.SEED_LOW]].tolist() == [-1, -1]
