"""OpenAI's own client."""

from __future__ import annotations

import json

import pytest
from client_inputs import ASK, MODEL, WEATHER, Drink, Person

pytestmark = pytest.mark.clients
openai = pytest.importorskip("openai")
CLIENT = "openai"


@pytest.fixture
def client(url):
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_chat(client):
    """chats, streamed or not"""
    messages = [{"role": "user", "content": "Say hello."}]
    fields = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    assert whole.choices[0].message.content and whole.usage.completion_tokens <= 12
    chunks = client.chat.completions.create(**fields, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == whole.choices[0].message.content and len(pieces) > 2


def test_completions(client):
    """completions with log probabilities"""
    answer = client.completions.create(model=MODEL, prompt="1 2 3", max_tokens=4, logprobs=2)
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.completion_tokens


def test_parse(client):
    """`parse` into Pydantic models"""
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": ASK}],
        response_format=Person,
        max_tokens=100,
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_tools(client):
    """parsed tool calls, streamed or not"""
    fields = {
        "model": MODEL,
        "messages": [{"role": "user", "content": WEATHER}],
        "tools": [openai.pydantic_function_tool(Drink)],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 80,
    }
    (call,) = client.chat.completions.parse(**fields).choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Drink)
    with client.chat.completions.stream(**fields) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == json.loads(call.function.arguments)


def test_responses(client):
    """responses: text, streams, parsed objects and tool calls"""
    fields = {"model": MODEL, "temperature": 0}
    whole = client.responses.create(input="Say hello.", max_output_tokens=16, **fields)
    stream = client.responses.create(
        input="Say hello.", max_output_tokens=16, stream=True, **fields
    )
    pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text and len(pieces) > 1
    parsed = client.responses.parse(input=ASK, text_format=Person, **fields)
    assert isinstance(parsed.output_parsed, Person)
    called = client.responses.parse(
        input=WEATHER,
        tools=[openai.pydantic_function_tool(Drink)["function"] | {"type": "function"}],
        tool_choice="required",
        parallel_tool_calls=False,
        **fields,
    )
    (call,) = called.output
    assert Drink.model_validate_json(call.arguments)


def test_errors(client):
    """typed errors"""
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=MODEL, prompt="a", temperature=9)
