"""Anthropic's own client."""

from __future__ import annotations

import pytest
from client_inputs import ASK, MODEL, WEATHER, Person, get_weather

pytestmark = pytest.mark.clients
anthropic = pytest.importorskip("anthropic")
CLIENT = "anthropic"

TOOL = {
    "name": "get_weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "London", "Rome"]}},
        "required": ["city"],
    },
}


@pytest.fixture
def client(url):
    url = url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_messages(client):
    """messages, streamed or not"""
    fields = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}]}
    fields |= {"max_tokens": 8, "extra_body": {"temperature": 0}}
    whole = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        pieces = [*stream.text_stream]
    assert "".join(pieces) == whole.content[0].text and len(pieces) > 1


def test_tool_loop(client):
    """a tool loop: a forced use, its result, an answer"""
    messages = [{"role": "user", "content": WEATHER}]
    fields = {"model": MODEL, "tools": [TOOL], "max_tokens": 60}
    choice = {"type": "tool", "name": "get_weather"}
    answer = client.messages.create(messages=messages, tool_choice=choice, **fields)
    (use,) = answer.content
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": use.id, "content": get_weather(**use.input)}
    messages += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(messages=messages, **fields).content[0].type == "text"


def test_parse(client):
    """`parse` into Pydantic models"""
    answer = client.messages.parse(
        model=MODEL,
        messages=[{"role": "user", "content": ASK}],
        output_format=Person,
        max_tokens=120,
    )
    assert isinstance(answer.parsed_output, Person)
