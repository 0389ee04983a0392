"""Several conversations in one request, against a request for each."""

from __future__ import annotations

from typing import Any

import pytest
from test_service import run
from tiny_engines import TinyModel

PATH = "/v1/chat/completions"
FIRST = [{"role": "user", "content": "Hi"}]
SECOND = [*FIRST, {"role": "assistant", "content": "Yes"}, {"role": "user", "content": "Why?"}]
SCHEMA = {"name": "s", "schema": {"enum": ["yes", "no"]}}


@pytest.fixture(scope="module")
def chatty(chat_model):
    return TinyModel.open(chat_model)


def tool(description: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "description": description}}


def same(one: Any, other: Any) -> bool:
    """Whether bodies are equal, up to the rounding of log probabilities in another batch."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == (pytest.approx(other, abs=1e-3) if isinstance(other, float) else other)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "n": 2},
        {"temperature": 1.2, "seed": 5, "return_token_ids": True, "prompt_logprobs": 1},
        {"seed": 5, "response_format": {"type": "json_schema", "json_schema": SCHEMA}},
        {"temperature": 0, "logprobs": True, "top_logprobs": 1, "echo": True},
        {"use_beam_search": True, "n": 2},
    ],
)
def test_choices_are_those_of_single_requests(chatty, fields):
    fields = fields | {"max_tokens": 8}

    async def scenario(client, service, engine):
        async def ask(path, messages):
            answer = await client.post(path, json=fields | {"messages": messages})
            assert answer.status_code == 200, answer.text
            return answer.json()

        together = await ask(f"{PATH}/batch", [FIRST, SECOND])
        expected, prompt_tokens, completion_tokens = [], 0, 0
        for messages in (FIRST, SECOND):
            alone = await ask(PATH, messages)
            of_prompt = {name: alone[name] for name in ("prompt_logprobs", "prompt_token_ids")}
            expected += [choice | of_prompt for choice in alone["choices"]]
            prompt_tokens += alone["usage"]["prompt_tokens"]
            completion_tokens += alone["usage"]["completion_tokens"]
        expected = [choice | {"index": index} for index, choice in enumerate(expected)]
        assert same(together["choices"], expected)
        assert together["object"] == "chat.completion"
        assert together["usage"]["prompt_tokens"] == prompt_tokens
        assert together["usage"]["completion_tokens"] == completion_tokens

    run(chatty, scenario)


def test_what_is_refused(chatty):
    async def scenario(client, service, engine):
        for fields, param in (
            ({"messages": []}, "messages"),
            ({"messages": FIRST}, "messages[0]"),
            ({"messages": [FIRST, []]}, "messages[1]"),
            ({"messages": [FIRST, [{"content": "x"}]]}, "messages[1][0].role"),
            ({"messages": [FIRST], "stream": True}, "stream"),
            ({"messages": [FIRST], "max_tokens": 0}, "max_tokens"),
            ({"messages": [FIRST] * 2048, "chat_template_kwargs": {"a": "b" * 4096}}, "messages"),
            ({"messages": [FIRST] * 2048, "tools": [tool("x" * 4096)]}, "messages"),
        ):
            answer = await client.post(f"{PATH}/batch", json=fields)
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param, answer.text

    run(chatty, scenario)


def test_more_sequences_than_the_queue_holds_are_refused_by_the_field_that_asks(chatty):
    async def scenario(client, service, engine):
        room = engine.info.max_num_seqs + 8
        many = ["a"] * (room + 1)
        for path, fields, param, number in (
            (PATH, {"messages": FIRST, "n": room + 1}, "n", room + 1),
            (f"{PATH}/batch", {"messages": [FIRST] * (room + 1)}, "messages", room + 1),
            (f"{PATH}/batch", {"messages": [FIRST] * room, "n": 2}, "messages", 2 * room),
            ("/v1/completions", {"prompt": many}, "prompt", room + 1),
            ("/v1/completions", {"prompt": "a", "best_of": room + 2}, "best_of", room + 2),
            ("/v1/embeddings", {"input": many}, "input", room + 1),
            ("/v1/score", {"text_1": "a", "text_2": many}, "text_2", room + 2),
        ):
            answer = await client.post(path, json=fields)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["param"] == param, error
            both = " and n" if number == 2 * room else ""
            said = f"{param}{both} must make at most {room} sequences on this server, got {number}."
            assert error["message"] == said

    run(chatty, scenario)
