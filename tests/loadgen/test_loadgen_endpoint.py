"""What is found out about endpoints that know more or less."""

from __future__ import annotations

import asyncio
import json

import pytest
from patience import PATIENCE_S

from jaxserve.core.errors import ConfigError, EndpointError
from jaxserve.loadgen.client import open_session
from jaxserve.loadgen.endpoint import LoadEndpoint, find_out
from jaxserve.loadgen.prompts import TextLength


def ask(base_url, kind="completions", model=None, prompt_format="auto", timeout_s=PATIENCE_S):
    async def run():
        async with open_session(None, timeout_s) as http:
            return await find_out(http, base_url, kind, model, prompt_format)

    return asyncio.run(run())


def test_the_first_model_served_and_the_length_of_its_words(server):
    found = ask(f"{server}/v1")
    assert (found.model, found.url, found.token_ids) == ("plain", f"{server}/v1/completions", None)
    assert found.text_length == TextLength(fixed=3.0, per_word=2.0)
    assert found.fields["ignore_eos"] and found.fields["return_token_ids"]


def test_token_ids_where_the_server_tells_some(server):
    assert ask(f"{server}/ids/v1").token_ids == (7, 8, 9)
    assert ask(f"{server}/ids/v1", prompt_format="text").token_ids is None
    assert ask(f"{server}/ids/v1", "chat").token_ids is None


def test_what_is_refused_is_not_asked_for(server):
    found = ask(f"{server}/v1", model="strict")
    assert found.fields == {}
    # Without usage the number of tokens of a word is unknown.
    assert found.text_length == TextLength()


def test_the_newer_name_of_the_limit(server):
    found = ask(f"{server}/v1", "chat", "new_limit")
    assert found.limit_name == "max_completion_tokens"
    assert json.loads(found.body("hi", 5)) == {
        "messages": [{"role": "user", "content": "hi"}],
        "model": "new_limit",
        "stream": True,
        "max_completion_tokens": 5,
        **found.fields,
    }


def test_a_prompt_of_token_ids():
    endpoint = LoadEndpoint("http://h/v1", "completions", "m", token_ids=(7,))
    body = json.loads(endpoint.body([7, 7], 5))
    assert body == {"model": "m", "prompt": [7, 7], "stream": True, "max_tokens": 5}


@pytest.mark.parametrize(
    ("path", "model", "words"),
    [
        ("/v1", "busy", ["busy", "HTTP 429", "too many requests"]),
        ("/v1", "broken", ["HTTP 500", "it is broken"]),
        ("/v1/elsewhere", None, ["HTTP 404", "--base-url", "--model-name"]),
        ("/elsewhere", "plain", ["HTTP 404", "Not Found"]),
    ],
)
def test_an_endpoint_of_no_use_is_an_error_that_says_why(server, path, model, words):
    with pytest.raises(EndpointError) as error:
        ask(server + path, model=model)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("model", [None, "plain"])
def test_no_server_listens_there(model):
    with pytest.raises(EndpointError, match="cannot be reached"):
        ask("http://127.0.0.1:9/v1", model=model)


def test_a_server_that_says_nothing_is_not_waited_for_without_end(server):
    with pytest.raises(EndpointError, match="cannot be reached"):
        ask(f"{server}/silent/v1", timeout_s=0.3)


def test_token_ids_that_cannot_be_had(server):
    with pytest.raises(EndpointError, match="no /tokenize"):
        ask(f"{server}/v1", prompt_format="token_ids")
    with pytest.raises(ConfigError, match="chat does not support token ids"):
        ask(f"{server}/v1", "chat", prompt_format="token_ids")
