from __future__ import annotations

import dataclasses
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.errors import RequestError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.requests.structured_outputs import StructuredOutputs


def test_defaults_match_the_contract():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.min_p, params.repetition_penalty, params.max_tokens) == (0.0, 1.0, 16)
    assert params.detokenize and params.skip_special_tokens
    assert not params.include_stop_str_in_output and not params.greedy


@pytest.mark.parametrize(
    ("field", "accepted", "refused"),
    [
        ("n", [1, 64], [0, 65, -1, 1.0, True, None]),
        ("temperature", [0, 0.0, 2, 1e-6], [-0.1, 2.1, math.nan, math.inf, "1", True, None]),
        ("top_p", [1, 1e-9], [0, 1.01, -1, math.nan]),
        ("top_k", [-1, 0, 1, 2**31 - 1], [-2, 2**31, 1.5, False]),
        ("min_p", [0, 1, 0.5], [-0.1, 1.1, math.nan]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1, math.nan]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1, math.inf]),
        ("repetition_penalty", [1e-6, 1, 5], [0, -1, math.nan, math.inf, 10**400]),
        ("seed", [None, 0, -(2**63), 2**63 - 1], [2**63, -(2**63) - 1, 1.0, True]),
        ("stop_token_ids", [[], [0, 7], None, tuple(range(48))], [[-1], [1.0], 3, range(49)]),
        ("min_tokens", [0, 16], [-1, 1.0, True]),
        ("max_tokens", [1, None, 2**31 - 1], [0, -1, 2.0, True]),
        ("logprobs", [None, 0, 20], [-1, 21, True]),
        ("prompt_logprobs", [None, 0, 20], [-1, 21, 1.0]),
        ("ignore_eos", [True, False], [0, 1, None]),
        ("detokenize", [True, False], ["yes"]),
        ("priority", [-5, 0, 5], [0.5, True, None]),
        ("stop", [None, "a", ["a", "b"], ()], ["", ["a", ""], [1], ["x"] * 33, ["x" * 1025], 3]),
        ("bad_words", [None, ["a b"]], [[""], "abc", ["w"] * 33, ["x" * 257], [1]]),
        ("allowed_token_ids", [None, [3], {1, 2}], [[], [-1], [True], "12", [0.5]]),
        (
            "logit_bias",
            [None, {}, {1: 5}],
            [{-1: 0.0}, {"1": 0.0}, {1: math.nan}, {1: True}, [1], dict.fromkeys(range(1025), 0)],
        ),
        (
            "structured_outputs",
            [None, {"json": {}}, StructuredOutputs(regex="a")],
            ["a", {}, {"regex": ""}, {"regex": "a", "json": {}}, {"regexp": "a"}],
        ),
    ],
)
def test_range_of_each_field(field, accepted, refused):
    for value in accepted:
        SamplingParams(**{field: value})
    for value in refused:
        with pytest.raises(RequestError, match=field):
            SamplingParams(**{field: value})


def test_messages_name_the_value_and_the_range():
    with pytest.raises(RequestError, match=re.escape("[0, 2], got 3.5")):
        SamplingParams(temperature=3.5)
    with pytest.raises(RequestError, match=re.escape("1..64, got 100")):
        SamplingParams(n=100)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"min_tokens": 17}, "max_tokens=16"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5"),
        ({"stop": "x", "detokenize": False}, "stop_token_ids"),
    ],
)
def test_contradictions_are_refused(fields, words):
    with pytest.raises(RequestError, match=words):
        SamplingParams(**fields)


def test_min_tokens_is_free_without_max_tokens():
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500


@given(st.floats(0, 2))
def test_greedy_is_a_temperature_below_1e_5(temperature):
    assert SamplingParams(temperature=temperature).greedy == (temperature < 1e-5)


def test_lists_become_tuples_and_the_object_is_frozen():
    bias = {1: 1000.0, 2: -math.inf, 3: 0.5}
    params = SamplingParams(
        stop="end", stop_token_ids=[1, 2], bad_words=["x"], allowed_token_ids=[5], logit_bias=bias
    )
    assert params.stop == ("end",) and params.stop_token_ids == (1, 2)
    assert params.bad_words == ("x",) and params.allowed_token_ids == (5,)
    assert params.logit_bias == {1: 100.0, 2: -100.0, 3: 0.5}
    bias[3] = 7.0
    assert params.logit_bias[3] == 0.5
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2


def test_defaults_of_a_model_yield_to_the_request():
    defaults = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": None,
        "max_new_tokens": 99,
        "bos_token_id": 1,
        "do_sample": True,
    }
    params = SamplingParams.from_defaults(defaults, top_p=0.5, seed=3)
    expected = SamplingParams(temperature=0.6, top_p=0.5, max_tokens=99, seed=3)
    assert params == expected
    assert SamplingParams.from_defaults(defaults, max_tokens=None).max_tokens is None


def test_bad_defaults_and_unknown_fields_are_refused():
    with pytest.raises(RequestError, match="temperature"):
        SamplingParams.from_defaults({"temperature": 7})
    with pytest.raises(RequestError, match="'use_beam_search' is not a sampling field"):
        SamplingParams.from_defaults({}, use_beam_search=True)


@pytest.mark.parametrize(
    "fields", [{"logit_bias": {9: 1}}, {"allowed_token_ids": [1, 9]}, {"stop_token_ids": [9]}]
)
def test_vocabulary_bounds_token_ids(fields):
    params = SamplingParams(**fields)
    params.check_vocabulary(10)
    with pytest.raises(
        RequestError, match=f"{next(iter(fields))} names token id 9.* 9 tokens.*0..8"
    ):
        params.check_vocabulary(9)
