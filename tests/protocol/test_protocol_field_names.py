"""Errors name the field that the client sent, and say what to do instead."""

from __future__ import annotations

import math
from typing import get_args

import pytest
from pydantic import ValidationError

from jaxserve.core.errors import RequestError
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.protocol.embeddings import EmbeddingRequest
from jaxserve.protocol.endpoints import ENDPOINTS, Endpoint
from jaxserve.protocol.errors import (
    REMEDIES,
    FieldError,
    field_error,
    name_by,
    renamed,
    reply_to,
)
from jaxserve.protocol.messages_api.request import CountTokensRequest, MessagesRequest
from jaxserve.protocol.model import Model
from jaxserve.protocol.responses_api.request import INCLUDABLE
from jaxserve.protocol.tokenizing import DetokenizeRequest, TokenizeRequest
from jaxserve.protocol.tools import Tool

REQUESTS = {path: endpoint.request for path, endpoint in ENDPOINTS.items()}
REQUESTS["/v1/messages"] = MessagesRequest
TURN = {"role": "user", "content": "Hi"}
MINIMAL = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [TURN]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [TURN], "max_tokens": 1},
}
STRING = {"type": "string"}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "objekt"}}}


@pytest.fixture(scope="module")
def model(chat_model):
    return Model(("tiny",), open_checkpoint(chat_model).tokenizer(), 256, 2048, {})


def call_of(path: str, fields: dict, model: Model):
    return Endpoint(REQUESTS[path]).parse(MINIMAL[path] | fields, model)


@pytest.mark.parametrize(
    "fields",
    [
        *({name: None} for name in (*REMEDIES, "best_of", "an_invention")),
        {"functions": [], "function_call": "none", "documents": [], "kv_transfer_params": {}},
        {"typical_p": 1.0, "mirostat": 0, "early_stopping": False, "length_penalty": 1.0},
        {"tool_choice": "auto", "tools": []},
        {"session_id": "a", "user": "b"},
    ],
    ids=lambda fields: ", ".join(fields),
)
def test_fields_that_ask_for_nothing_are_accepted(model, fields):
    assert call_of("/v1/chat/completions", fields, model).ignored_tools is None


def test_what_a_client_says_of_a_tool_to_its_cache_reaches_no_template():
    function = {"name": "f", "parameters": {}}
    marked = function | {"cache_control": {"type": "ephemeral"}}
    tool = Tool.model_validate({"type": "function", "function": marked})
    assert tool.model_dump(exclude_none=True)["function"] == function


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("completions", {"suffix": "x"}, "suffix is not accepted; leave"),
        ("completions", {"vllm_xargs": {"a": 1e39}}, "vllm_xargs must"),
        ("completions", {"guided_regex": ""}, "guided_regex must be non-empty"),
        ("completions", {"stream": None, "n": True}, "n must be a valid integer, got true"),
        ("completions", {"length_penalty": 1.5}, "needs use_beam_search"),
        ("completions", {"stream_options": {"stream": 1}}, "stream_options.stream is not a field"),
        (
            "chat/completions",
            {"functions": [{}]},
            "functions is not a field of this request; use",
        ),
        ("chat/completions", {"documents": ["a"]}, "write them into the messages"),
        ("completions", {"max_completion_tokens": 5}, "of this request; use max_tokens."),
        ("responses", {"max_completion_tokens": 5}, "of this request; use max_output_tokens."),
        ("messages", {"extra_body": {"top_k": 1}}, "request; put its fields into the body."),
        ("completions", {"stop": 5}, "stop must be a valid string or a valid list, got 5."),
        ("responses", {"input": 5}, "input must be a valid string or a valid list, got 5."),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": {}}]},
            "messages[0].content must be a valid string or a valid list, got {}.",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user"}]},
            "messages[0].content is missing; it must be a string or a list of text parts.",
        ),
        (
            "chat/completions",
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name must be 1 to 64 of A-Z a-z 0-9 _ -, got 'a b'.",
        ),
        (
            "chat/completions",
            {"tool_choice": "maybe"},
            "tool_choice must be 'none', 'auto' or 'required', or an object, got 'maybe'.",
        ),
        (
            "responses",
            {"include": ["reasoning.encrypted_content", "message.output_text.logprob"]},
            "include has 'message.output_text.logprob', which is not one of OpenAI's entries; "
            "did you mean message.output_text.logprobs?",
        ),
        ("responses", {"include": ["all"]}, "entries; leave it out, or use message.output_"),
        ("responses", {"top_logprobs": 2}, "top_logprobs needs 'message.output_text.logprobs' in"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 30}, "top_logprobs must be"),
        ("chat/completions", {"max_completion_tokens": 0}, "max_completion_tokens must be"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens must be"),
        ("chat/completions", {"messages": []}, "messages is empty"),
        (
            "chat/completions",
            {"continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt conflict; give one of them",
        ),
        ("completions", {"prompt": "a" * 99_999, "truncate_prompt_tokens": 5}, "within this limit"),
        ("chat/completions", {"logit_bias": 3}, "logit_bias must be an object"),
        ("chat/completions", {"logit_bias": {"a": 1, "5": 1, "b": 1}}, "got the keys 'a', 'b'."),
        ("responses", {"max_tokens": 5}, "max_tokens is not accepted; use max"),
        ("responses", {"background": True}, "background needs a server"),
        ("responses", {"max_output_tokns": 5}, "request; did you mean max_output_tokens?"),
        ("chat/completions", {"max_tokns": 5}, "request; did you mean max_tokens?"),
        ("responses", {"max_output_tokens": 0}, "max_output_tokens must be"),
        (
            "responses",
            {"include": ["message.output_text.logprobs"], "top_logprobs": 30},
            "top_logprobs must be",
        ),
        (
            "responses",
            {"tools": [{"type": "function", "name": "f", "parameters": STRING}]},
            "tools[0].parameters.type is",
        ),
        ("messages", {"stop": "x"}, "stop is not accepted; use stop_sequences"),
        ("messages", {"stop_sequences": [""]}, "stop_sequences must hold"),
        (
            "messages",
            {"tools": [{"name": "f", "input_schema": STRING}]},
            "tools[0].input_schema.type is",
        ),
        (
            "messages",
            {"output_config": {"effort": "low"}},
            "output_config.effort is not a variable",
        ),
    ],
)
def test_an_error_names_what_was_sent(model, path, fields, said):
    with pytest.raises(RequestError) as refusal:
        call_of(f"/v1/{path}", fields, model)
    assert said in str(refusal.value)
    assert "None" not in str(refusal.value) and "False" not in str(refusal.value)


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        (
            "chat/completions",
            {"response_format": FORM},
            "response_format.json_schema.schema",
        ),
        ("completions", {"guided_json": {}}, "guided_json"),
        ("completions", {"structured_outputs": {"json": {}}}, "structured_outputs.json"),
        (
            "responses",
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}},
            "text.format.schema",
        ),
        (
            "messages",
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "output_config.format.schema",
        ),
        (
            "messages",
            {"output_format": {"type": "json_schema", "schema": {}}},
            "output_format.schema",
        ),
        (
            "messages",
            {
                "tools": [{"name": "f", "input_schema": {"type": "object"}}],
                "tool_choice": {"type": "any"},
            },
            "tools",
        ),
    ],
)
def test_errors_of_compiled_schemas_name_what_was_sent(model, path, fields, name):
    names = call_of(f"/v1/{path}", fields, model).names
    assert name_by(names, "structured_outputs.json") == name
    told = renamed(RequestError("structured_outputs.json: no such type."), names)
    assert str(told).startswith(name) and str(told).endswith(": no such type.")


@pytest.mark.parametrize("path", MINIMAL)
def test_null_is_absent_in_fields_that_are_refused(path):
    refused = {"suffix", "stop", "n", "max_tokens", "response_format", "use_beam_search"}
    refused &= set(REQUESTS[path].model_fields) - set(MINIMAL[path])
    REQUESTS[path].model_validate(MINIMAL[path] | dict.fromkeys(refused))
    with pytest.raises(ValidationError) as refusal:
        REQUESTS[path].model_validate(MINIMAL[path] | {"n": "two"})
    assert field_error(refusal.value).field == "n"


def test_include_takes_what_openai_names(model):
    responses = pytest.importorskip("openai.types.responses")
    known = get_args(responses.ResponseIncludable)
    assert set(known) <= set(INCLUDABLE)
    assert call_of("/v1/responses", {"include": list(known)}, model).chat.params.logprobs == 0
    with pytest.raises(RequestError) as refusal:
        call_of("/v1/responses", {"include": ["all"]}, model)
    assert reply_to(refusal.value).param == "include"


def test_fields_of_the_tokenizers_routes_are_named(model):
    with pytest.raises(ValidationError) as refusal:
        TokenizeRequest.model_validate({"text": "Hi"})
    error = field_error(refusal.value, TokenizeRequest)
    assert str(error) == "text is not a field of this request; use prompt or messages."
    with pytest.raises(FieldError, match=r"^tokens\[1\] is 256; this model's ids are 0\.\.255\.$"):
        DetokenizeRequest(tokens=[3, 256]).answer(model)


def integer_fields(request):
    """The fields of a request that are integers, by what its schema says."""
    for name, schema in request.model_json_schema()["properties"].items():
        kinds = [each.get("type") for each in (schema, *schema.get("anyOf", ()))]
        if "integer" in kinds:
            yield name


@pytest.mark.parametrize(
    ("request_type", "body", "count"),
    [
        *((REQUESTS[path], MINIMAL[path], 8) for path in MINIMAL),
        (EmbeddingRequest, {"input": "Hi"}, 3),
        (CountTokensRequest, MINIMAL["/v1/messages"], 8),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_integers_may_be_written_with_a_point(request_type, body, count):
    """As JSON has it: 1.0 is an integer. Text and booleans are none."""
    names = list(integer_fields(request_type))
    assert len(names) >= count
    for name in names:
        for given in (1, 1.0):
            value = getattr(request_type.model_validate(body | {name: given}), name)
            assert value == 1 and type(value) is int, name
        for given in (1.5, True, "1", math.nan, math.inf, 1e300, [1]):
            with pytest.raises(ValidationError) as refusal:
                request_type.model_validate(body | {name: given})
            error = field_error(refusal.value)
            assert str(error).startswith((f"{name} must be a valid integer", f"{name} must be 1;"))


def test_token_ids_may_be_written_with_a_point(model):
    for prompt in ([5.0, 6], [5.0, 6.0], [[5.0, 6.0]]):
        fields = {"prompt": prompt, "stop_token_ids": [7.0], "logprob_token_ids": [8.0]}
        call = call_of("/v1/completions", fields, model)
        assert call.prompts[0].token_ids == [5, 6]
        assert (call.params.stop_token_ids, call.params.logprob_token_ids) == ((7,), (8,))
    for prompt, said in (
        ([5.5], "prompt must be text, token ids"),
        ([math.inf], "prompt must be text, token ids"),
        ([5.0, True], "prompt must be text, token ids"),
        ([[5.5]], "prompt[0][0] must be a valid integer, got 5.5."),
    ):
        with pytest.raises(RequestError) as refusal:
            call_of("/v1/completions", {"prompt": prompt}, model)
        assert said in str(refusal.value)
