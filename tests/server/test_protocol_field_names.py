"""Errors name the field that the client sent, and say what to do instead."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from jaxserve.core.errors import RequestError
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.protocol.endpoints import ENDPOINTS, Endpoint
from jaxserve.protocol.errors import REMEDIES, field_error, name_by, renamed
from jaxserve.protocol.messages_api.request import MessagesRequest
from jaxserve.protocol.model import Model
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
    assert call_of("/v1/chat/completions", fields, model).warning is None


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
