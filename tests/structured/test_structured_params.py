"""What may be asked of the form of an output, before any model is known."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.commands import AddRequest
from jaxserve.core.errors import RequestError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.requests.structured_outputs import (
    MAX_CHOICES,
    MAX_GRAMMAR_BYTES,
    StructuredOutputs,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
options = st.one_of(
    st.fixed_dictionaries({"json": st.dictionaries(texts, texts)}),
    st.fixed_dictionaries({"regex": texts}),
    st.fixed_dictionaries({"choice": st.lists(texts, min_size=1, max_size=5)}),
    st.fixed_dictionaries({"grammar": texts}),
    st.just({"json_object": True}),
    st.builds(
        lambda schema, disable: {"json": schema, "disable_additional_properties": disable},
        st.dictionaries(texts, texts),
        st.booleans(),
    ),
)


@given(spec=options)
def test_a_spec_survives_json_and_the_log_of_several_hosts(spec):
    params = SamplingParams(structured_outputs=spec)
    asked = params.structured_outputs
    assert asked == StructuredOutputs(**spec)
    assert asked.kind in spec
    assert asked == StructuredOutputs.of(asked.to_json())
    added = AddRequest(
        request_id="id",
        prompt="text",
        token_ids=[1],
        params=params,
        priority=None,
        tenant=None,
        cache_salt=None,
        seed=3,
        first_seq_id=0,
    )
    read = AddRequest.from_json(json.loads(json.dumps(added.to_json(None))), None)
    assert read == added
    assert hash(read.params.structured_outputs) == hash(asked)


def test_a_schema_is_kept_as_it_was_written():
    """Properties come in its order, so that it must not change."""
    schema = {"type": "object", "properties": {"b": {}, "a": {"const": "ä"}}}
    assert StructuredOutputs(json=schema).json == json.dumps(schema, ensure_ascii=False)
    text = '{ "type" : "object" }'
    assert StructuredOutputs(json=text).json == text


@pytest.mark.parametrize(
    "spec, message",
    [
        ({}, "nothing set; set exactly one of json, regex, choice"),
        ({"regex": "a", "choice": ["b"]}, "regex and choice set"),
        ({"pattern": "a"}, "no field 'pattern'"),
        ("json", "must be StructuredOutputs or a mapping, got 'json'"),
        ({"json": "{"}, "json is not valid JSON"),
        ({"json": {"default": float("nan")}}, "json is not valid JSON"),
        ({"json": {"default": {1, 2}}}, "json is not valid JSON"),
        ({"json": "[1]"}, "must be a JSON schema, an object, got"),
        ({"json": 3}, "must be a JSON schema, an object, got 3"),
        ({"regex": ""}, "regex must be non-empty text"),
        ({"regex": 3}, "regex must be non-empty text, got 3"),
        ({"regex": "\ud800"}, "regex must be valid Unicode"),
        ({"grammar": "a" * (MAX_GRAMMAR_BYTES + 1)}, f"at most {MAX_GRAMMAR_BYTES} are allowed"),
        ({"json": {"a": "ä" * MAX_GRAMMAR_BYTES}}, f"at most {MAX_GRAMMAR_BYTES} are allowed"),
        ({"choice": []}, f"choice has 0 entries; it must have 1..{MAX_CHOICES}"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, f"{MAX_CHOICES + 1} entries"),
        ({"choice": "ab"}, "choice must be a list, got 'ab'"),
        ({"choice": ["a", ""]}, "choice must be non-empty text, got ''"),
        ({"choice": ["ab" * MAX_GRAMMAR_BYTES]}, "bytes; at most"),
        ({"json_object": False}, "json_object must be True, got False"),
        ({"json_object": "yes"}, "json_object must be True, got 'yes'"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(spec, message):
    with pytest.raises(RequestError) as refusal:
        SamplingParams(structured_outputs=spec)
    assert "structured_outputs" in str(refusal.value)
    assert message in str(refusal.value)


def test_json_nested_too_deeply_is_refused():
    with pytest.raises(RequestError, match="not valid JSON"):
        StructuredOutputs(json='{"a":' * 100_000)


def test_params_with_structured_outputs_can_be_replaced_field_by_field():
    params = SamplingParams(structured_outputs={"choice": ["a", "b"]})
    longer = dataclasses.replace(params, max_tokens=99)
    assert longer.structured_outputs == params.structured_outputs
