"""`/v1/responses` by OpenAI's client: text, streams, tools and structured output."""

from __future__ import annotations

import json
from typing import Literal

import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.interfaces

MESSAGES = [{"role": "user", "content": "Hi"}]
GREEDY = {"model": "tiny", "temperature": 0}
MORE = {"extra_body": {"ignore_eos": True}}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a place",
    "parameters": {
        "type": "object",
        "properties": {"place": {"enum": ["Rome", "Oslo"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
    "strict": True,
}


def test_text_is_that_of_a_chat(client):
    chat = client.chat.completions.create(
        messages=[{"role": "system", "content": "Be short."}, *MESSAGES],
        max_tokens=20,
        **GREEDY,
        **MORE,
    )
    parts = [{"type": "input_text", "text": "Hi"}]
    for given in ("Hi", MESSAGES, [{"type": "message", "role": "user", "content": parts}]):
        answer = client.responses.create(
            input=given, instructions="Be short.", max_output_tokens=20, **GREEDY, **MORE
        )
        assert answer.output_text == chat.choices[0].message.content
        assert answer.status == "incomplete"
        assert answer.incomplete_details.reason == "max_output_tokens"
        usage = answer.usage
        assert (usage.input_tokens, usage.output_tokens) == (chat.usage.prompt_tokens, 20)
        assert usage.total_tokens == usage.input_tokens + 20
        assert usage.output_tokens_details.reasoning_tokens == 0


def test_a_stream_adds_up_to_the_response(client):
    fields = {"input": "Hi", "max_output_tokens": 200, **GREEDY, **MORE}
    whole = client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
        events = list(stream)
    final = events[-1].response
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == whole.output_text and len(deltas) > 1
    assert final.usage.output_tokens == whole.usage.output_tokens == 200


def test_an_answer_is_sent_back_as_it_came(client):
    first = client.responses.create(input="Hi", max_output_tokens=5, **GREEDY, **MORE)
    items = [*MESSAGES, *first.output, {"role": "user", "content": "And?"}]
    dumped = [item if isinstance(item, dict) else item.model_dump() for item in items]
    answers = [
        client.responses.create(input=given, max_output_tokens=5, **GREEDY, **MORE)
        for given in (items, dumped)
    ]
    chat = client.chat.completions.create(
        messages=[*MESSAGES, {"role": "assistant", "content": first.output_text}, items[-1]],
        max_tokens=5,
        **GREEDY,
        **MORE,
    )
    assert {answer.output_text for answer in answers} == {chat.choices[0].message.content}


class Painting(BaseModel):
    colour: Literal["red", "green"]


def test_parse_gives_a_pydantic_model(client):
    answer = client.responses.parse(
        input="Paint", text_format=Painting, model="tiny", max_output_tokens=200
    )
    assert answer.output_parsed.colour in ("red", "green") and answer.status == "completed"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_forced_call_is_streamed_and_its_output_sent_back(client, choice):
    fields = {"model": "tiny", "input": MESSAGES, "tools": [WEATHER], "tool_choice": choice}
    fields |= {"parallel_tool_calls": False, "extra_body": {"seed": 3}, "max_output_tokens": 200}
    whole = client.responses.create(**fields)
    events = list(client.responses.create(**fields, stream=True))
    kind = "response.function_call_arguments.delta"
    deltas = [event.delta for event in events if event.type == kind]
    (call,) = whole.output
    (streamed,) = events[-1].response.output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["place"] in ("Rome", "Oslo")
    assert "".join(deltas) == streamed.arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    again = client.responses.create(
        model="tiny", input=[*MESSAGES, call, result], tools=[WEATHER], max_output_tokens=2
    )
    assert again.usage.output_tokens == 2


def test_a_call_that_the_model_chooses(client):
    """A random model writes one if a grammar leaves it nothing else."""
    call = (
        r'Well\. <tool_call>\n\{"name": "weather", "arguments": \{"place": "Rome"\}\}\n</tool_call>'
    )
    body = {"structured_outputs": {"regex": call}}
    fields = {"model": "tiny", "input": "Hi", "tools": [WEATHER], "extra_body": body}
    with client.responses.stream(**fields, max_output_tokens=200) as stream:
        message, called = stream.get_final_response().output
    assert message.content[0].text == "Well. "
    assert (called.name, json.loads(called.arguments)) == ("weather", {"place": "Rome"})
    chunks = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        tools=[{"type": "function", "function": {"name": "weather"}}],
        max_tokens=200,
        stream=True,
        extra_body=body,
    )
    choices = [chunk.choices[0] for chunk in chunks]
    deltas = [each for choice in choices for each in choice.delta.tool_calls or ()]
    assert deltas[0].function.name == "weather" and deltas[0].id
    assert [delta.function.name for delta in deltas[1:]] == [None] * (len(deltas) - 1)
    arguments = [delta.function.arguments for delta in deltas]
    assert json.loads("".join(arguments)) == {"place": "Rome"}
    assert choices[-1].finish_reason == "tool_calls"


def test_logprobs_of_the_text(client):
    answer = client.responses.create(
        input="Hi",
        max_output_tokens=4,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        **GREEDY,
        **MORE,
    )
    scores = answer.output[0].content[0].logprobs
    assert len(scores) == 4 and all(len(score.top_logprobs) == 2 for score in scores)


def test_what_does_no_harm_is_accepted(client):
    answer = client.responses.create(
        input="Hi",
        max_output_tokens=2,
        store=True,
        metadata={"run": "7"},
        user="u",
        prompt_cache_key="k",
        service_tier="auto",
        text={"format": {"type": "text"}, "verbosity": "low"},
        reasoning={"summary": "auto"},
        include=["reasoning.encrypted_content"],
        truncation="auto",
        **GREEDY,
    )
    assert answer.metadata == {"run": "7"} and answer.model_extra["store"] is True


def test_stored_responses_are_read_and_deleted(client):
    import openai

    options = {"max_output_tokens": 2, **GREEDY}
    answer = client.responses.create(input="Hi", **options)
    again = client.responses.create(input="And?", previous_response_id=answer.id, **options)
    assert client.responses.retrieve(again.id).output == again.output
    listed = client.responses.input_items.list(again.id, order="asc", limit=2)
    roles = [item.role for item in listed]  # It asks for the second page.
    assert roles == ["user", "assistant", "user"]
    client.responses.delete(answer.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True, "store": False}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ],
)
def test_what_changes_the_answer_is_refused(client, fields, param):
    import openai

    with pytest.raises(openai.BadRequestError) as refusal:
        client.responses.create(**{"model": "tiny", "input": "Hi"} | fields)
    assert refusal.value.param == param and refusal.value.body["message"].startswith(param)
