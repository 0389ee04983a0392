"""`/v1/messages` by Anthropic's client: text, streams, tools, stops and counts."""

from __future__ import annotations

import pytest
from patience import PATIENCE_S

pytestmark = pytest.mark.interfaces

MESSAGES = [{"role": "user", "content": "Hi"}]
MORE = {"extra_body": {"temperature": 0, "ignore_eos": True}}
WEATHER = {
    "name": "weather",
    "description": "The weather of a place",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"enum": ["Rome", "Oslo"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def claude(server):
    anthropic = pytest.importorskip("anthropic")
    url = f"http://127.0.0.1:{server.port}"
    with anthropic.Anthropic(
        base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        yield client


def test_text_is_that_of_a_chat(claude, client):
    chat = client.chat.completions.create(
        messages=[{"role": "system", "content": "Be short."}, *MESSAGES],
        max_tokens=20,
        model="tiny",
        **MORE,
    )
    blocks = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
    for content in ("Hi", blocks):
        answer = claude.messages.create(
            messages=[{"role": "user", "content": content}],
            system="Be short.",
            max_tokens=20,
            model="tiny",
            **MORE,
        )
        (block,) = answer.content
        assert block.text == chat.choices[0].message.content
        assert (answer.role, answer.stop_reason, answer.stop_sequence) == (
            "assistant",
            "max_tokens",
            None,
        )
        usage = answer.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == chat.usage.prompt_tokens
        assert usage.output_tokens == 20


def test_a_stream_adds_up_to_the_message(claude):
    fields = {"messages": MESSAGES, "max_tokens": 200, "model": "tiny", **MORE}
    whole = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == final.content[0].text == whole.content[0].text and len(pieces) > 1
    assert final.stop_reason == whole.stop_reason == "max_tokens"
    assert final.usage.output_tokens == 200
    kinds = [event.type for event in claude.messages.create(**fields, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_stop_sequences(claude):
    fields = {"messages": MESSAGES, "max_tokens": 30, "model": "tiny", **MORE}
    text = claude.messages.create(**fields).content[0].text
    stop = text[10:12]
    answer = claude.messages.create(**fields, stop_sequences=[stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_tool_is_used_and_its_result_sent_back(claude, choice):
    fields = {"model": "tiny", "messages": MESSAGES, "tools": [WEATHER], "max_tokens": 200}
    fields |= {"tool_choice": choice | {"disable_parallel_tool_use": True}}
    fields |= {"extra_body": {"seed": 3}}
    answer = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        events = list(stream)
        streamed = stream.get_final_message()
    (use,) = answer.content
    assert (answer.stop_reason, use.type, use.name) == ("tool_use", "tool_use", "weather")
    assert use.input["place"] in ("Rome", "Oslo")
    assert streamed.content[0].input == use.input and streamed.stop_reason == "tool_use"
    assert sum(event.type == "input_json" for event in events) > 3
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "rain"}
    text = {"type": "text", "text": "So?"}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result, text]},
    ]
    again = claude.messages.create(
        model="tiny", messages=messages, tools=[WEATHER], max_tokens=2, **MORE
    )
    assert again.usage.output_tokens == 2


def test_the_last_message_is_continued(claude, client):
    begun = [*MESSAGES, {"role": "assistant", "content": "Well, "}]
    answer = claude.messages.create(messages=begun, max_tokens=5, model="tiny", **MORE)
    body = MORE["extra_body"] | {"continue_final_message": True, "add_generation_prompt": False}
    chat = client.chat.completions.create(
        messages=begun, max_tokens=5, model="tiny", extra_body=body
    )
    assert answer.content[0].text == chat.choices[0].message.content


def test_tokens_are_counted(claude, client):
    fields = {"messages": MESSAGES, "system": "Be short.", "tools": [WEATHER]}
    counted = claude.messages.count_tokens(model="tiny", **fields).input_tokens
    answer = claude.messages.create(**fields, max_tokens=1, model="tiny", **MORE)
    assert counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_json_of_a_schema(claude):
    schema = WEATHER["input_schema"]
    answer = claude.messages.create(
        messages=MESSAGES,
        max_tokens=200,
        model="tiny",
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    )
    assert '"place"' in answer.content[0].text


def test_what_does_no_harm_is_accepted(claude):
    claude.messages.create(
        messages=MESSAGES,
        max_tokens=2,
        metadata={"user_id": "u"},
        service_tier="auto",
        thinking={"type": "adaptive"},
        extra_headers={"anthropic-beta": "context-management-2025-06-27"},
        extra_query={"beta": "true"},
        model="tiny",
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"extra_body": {"containers": 1}}, "containers"),
        ({"output_config": {"effort": "low"}}, "output_config.effort is not a variable"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "objekt"}}}},
            "output_config.format.schema is refused",
        ),
    ],
)
def test_errors_have_anthropics_format(claude, fields, said):
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as refusal:
        claude.messages.create(**{"model": "tiny", "messages": MESSAGES, "max_tokens": 2} | fields)
    body = refusal.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert said in body["error"]["message"]


def test_an_unknown_model_is_not_found(claude):
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as refusal:
        claude.messages.create(model="other", messages=MESSAGES, max_tokens=2)
    assert refusal.value.body["error"]["type"] == "not_found_error"
