"""What is answered to errors, and how bodies that pydantic refuses are spoken of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from jaxserve.core.errors import EngineClosedError, PromptTooLongError, RequestError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.offline.requests import LineErrorCode
from jaxserve.protocol.completions import CompletionRequest
from jaxserve.protocol.endpoints import ENDPOINTS
from jaxserve.protocol.errors import (
    ErrorCode,
    FieldError,
    GenerationFailedError,
    ModelNotFoundError,
    OverloadedError,
    TextTooLongError,
    UnavailableError,
    field_error,
    reply_to,
)

DOCS = Path(__file__).parents[2] / "docs"


def members(union) -> set[str]:
    """The words of a union of literals."""
    return {word for part in get_args(union) for word in (get_args(part) or (part,))}


CODES = members(ErrorCode)
LINE_CODES = members(LineErrorCode)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("x"), 400, "invalid_request"),
        (RequestError("temperature must be 0"), 400, "invalid_value"),
        (
            FieldError("n", "is missing", "missing_required_parameter"),
            400,
            "missing_required_parameter",
        ),
        (PromptTooLongError("x"), 400, "context_length_exceeded"),
        (TextTooLongError("x"), 400, "context_length_exceeded"),
        (GenerationFailedError("x"), 422, "generation_failed"),
        (ModelNotFoundError("x"), 404, "model_not_found"),
        (OverloadedError("x"), 429, "overloaded"),
        (UnavailableError("x"), 503, "unavailable"),
        (EngineClosedError("x"), 503, "unavailable"),
        (RuntimeError("a secret"), 500, None),
    ],
)
def test_each_error_has_its_status(error, status, code):
    reply = reply_to(error)
    assert (reply.status, reply.code) == (status, code)
    assert set(reply.body["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in reply.message
    assert (reply.retry_after_s is not None) == (status in (429, 503))


def test_codes_are_documented():
    """Those of the server in its page, those of lines in that of batch jobs."""
    for document, codes in (("serving", CODES), ("batch", LINE_CODES - CODES)):
        text = (DOCS / f"{document}.md").read_text(encoding="utf-8")
        assert {code for code in codes if f"`{code}`" not in text} == set()


def test_the_field_of_a_sampling_error_is_told():
    for fields in ({"n": 99}, {"top_p": 7.0}, {"stop": [""]}, {"logit_bias": {-1: 0.0}}):
        with pytest.raises(RequestError) as refusal:
            SamplingParams(**fields)
        assert reply_to(refusal.value).param == next(iter(fields))
    assert reply_to(RequestError("this model has none")).param is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    st.sampled_from(list(ENDPOINTS)),
    st.dictionaries(
        st.sampled_from(sorted(CompletionRequest.model_fields)) | st.text(max_size=6),
        json_values,
        max_size=4,
    ),
)
def test_any_body_is_parsed_or_named(path, fields):
    """A body that is refused is refused by a message that could be sent."""
    try:
        ENDPOINTS[path].request.model_validate(fields)
    except ValidationError as error:
        found = field_error(error)
        assert found.field and str(found).startswith(found.field)
        assert found.code in CODES
        json.dumps(reply_to(found).body).encode()


MANY = 100_000


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": ["a"] * MANY},
        {"stop": [1] * MANY},
        {"prompt": [1, 2] * MANY + ["a"]},
        {"prompt": [[1]] * MANY + [["a"]]},
        {"logit_bias": {str(i): "a" for i in range(MANY)}},
        {"vllm_xargs": {str(i): 1.0 for i in range(MANY)}},
        {"structured_outputs": {"choice": [1] * MANY}},
        {"structured_outputs": {"json": {f"\ud800{i}": 1 for i in range(MANY)}}},
        {f"unknown{i}": i for i in range(MANY)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_body_that_is_all_wrong_is_refused_at_its_first_mistake(fields):
    with pytest.raises(ValidationError) as refusal:
        CompletionRequest.model_validate({"prompt": "a"} | fields)
    assert refusal.value.error_count() <= 4  # one for each kind that the field may have
    found = field_error(refusal.value)
    assert found.field.startswith(next(iter(fields))) and len(str(found)) < 300


def test_a_million_messages_are_refused_at_the_first_that_is_wrong():
    body = {"messages": [{"role": 1}] * MANY}
    with pytest.raises(ValidationError) as refusal:
        ENDPOINTS["/v1/chat/completions"].request.model_validate(body)
    assert refusal.value.error_count() == 1


def test_a_message_that_quotes_its_client_is_bounded():
    error = RequestError("structured_outputs.regex: " + "(" * 100_000 + " is bad.")
    message = reply_to(error).message
    assert len(message) < 2100
    assert message.startswith("structured_outputs.regex: (((") and message.endswith("((( is bad.")
    assert reply_to(RequestError("x" * 2000)).message == "x" * 2000
