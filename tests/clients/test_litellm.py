"""LiteLLM, by its provider for OpenAI's interface."""

from __future__ import annotations

import json
import os

import pytest
from client_inputs import MODEL, WEATHER, get_weather

pytestmark = pytest.mark.clients
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # No prices from elsewhere.
litellm = pytest.importorskip("litellm")
CLIENT = "litellm"

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "London", "Rome"]}},
            "required": ["city"],
        },
    },
}


@pytest.fixture
def fields(url):
    return {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none", "temperature": 0}


def test_tool_loop(fields):
    """a tool loop: a forced call, its result, an answer"""
    messages = [{"role": "user", "content": WEATHER}]
    tools = {"tools": [TOOL], "max_tokens": 60}
    choice = litellm.completion(messages=messages, tool_choice="required", **tools, **fields)
    message = choice.choices[0].message
    (call,) = message.tool_calls[:1]
    result = get_weather(**json.loads(call.function.arguments))
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    answer = litellm.completion(messages=messages, **tools, **fields)
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


def test_stream(fields):
    """streams that count their tokens"""
    messages = [{"role": "user", "content": "Say hello."}]
    fields |= {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 8}
    chunks = [*litellm.completion(messages=messages, **fields)]
    whole = litellm.stream_chunk_builder(chunks)
    assert whole.choices[0].message.content and 1 < whole.usage.completion_tokens <= 8
