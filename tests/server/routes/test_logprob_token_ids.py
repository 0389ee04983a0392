"""Log probabilities of given tokens, in the formats of completions and chats."""

from __future__ import annotations

import json

import pytest
from test_service import run
from tiny_engines import TinyModel

from jaxserve.core.errors import RequestError
from jaxserve.core.requests.sampling_params import SamplingParams

IDS = [7, 200, 31]
NAMES = {f"token_id:{token}" for token in IDS}
MORE = {
    "max_tokens": 4,
    "temperature": 0,
    "logprob_token_ids": IDS,
    "return_tokens_as_token_ids": True,
}
CHAT = MORE | {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def test_responses_list_the_given_tokens_and_the_sampled_one(chat_model):
    async def scenario(client, service, engine):
        async def ask(path, **fields):
            answer = await client.post(path, json=fields)
            assert answer.status_code == 200, answer.text
            return answer

        for top in (None, 5):
            body = (await ask(CHATS, **CHAT, top_logprobs=top)).json()
            for entry in body["choices"][0]["logprobs"]["content"]:
                listed = entry["top_logprobs"]
                assert {each["token"] for each in listed} == NAMES | {entry["token"]}
                values = [each["logprob"] for each in listed]
                assert values == sorted(values, reverse=True)
        answer = await ask(CHATS, **CHAT, stream=True)
        events = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: {")]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        streamed = [
            entry["top_logprobs"]
            for choice in choices
            if choice["logprobs"]
            for entry in choice["logprobs"]["content"]
        ]
        whole = body["choices"][0]["logprobs"]["content"]
        assert len(streamed) == len(whole) == 4
        for logprobs in (None, 2):
            body = (await ask(COMPLETIONS, **MORE, prompt=[5, 6], logprobs=logprobs)).json()
            scores = body["choices"][0]["logprobs"]
            for token, listed in zip(scores["tokens"], scores["top_logprobs"], strict=True):
                assert set(listed) == NAMES | {token}
        body = (await ask(COMPLETIONS, **MORE, prompt=[5, 6], echo=True)).json()
        scores = body["choices"][0]["logprobs"]
        assert scores["tokens"][:2] == ["token_id:5", "token_id:6"]
        first, second, *others = scores["top_logprobs"]
        assert first is None and set(second) == {"token_id:6"}
        assert len(others) == 4 and all(set(listed) >= NAMES for listed in others)
        for path, fields, param in (
            (COMPLETIONS, MORE | {"prompt": "a", "echo": True, "stream": True}, None),
            (CHATS, CHAT | {"logprobs": False}, "logprob_token_ids"),
            (CHATS, CHAT | {"logprob_token_ids": [256]}, "logprob_token_ids"),
            (CHATS, CHAT | {"logprob_token_ids": list(range(21))}, "logprob_token_ids"),
            (CHATS, CHAT | {"use_beam_search": True}, "logprob_token_ids"),
            (COMPLETIONS, MORE | {"prompt": "a", "max_tokens": 0, "echo": True}, None),
        ):
            refused = await client.post(path, json=fields)
            assert refused.status_code == 400, refused.text
            error = refused.json()["error"]
            assert error["param"] == (param or "logprob_token_ids"), error

    run(TinyModel.open(chat_model), scenario)


def test_what_params_say():
    assert SamplingParams(logprob_token_ids=[1]).logprobs == 0
    assert SamplingParams(logprob_token_ids=[1], logprobs=5).num_listed_logprobs == 1
    assert SamplingParams(logprob_token_ids=[]).logprob_token_ids is None
    with pytest.raises(RequestError, match="logprob_token_ids has 21 entries"):
        SamplingParams(logprob_token_ids=range(21))
