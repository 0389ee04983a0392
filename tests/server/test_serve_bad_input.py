"""Requests that are wrong in every way: each has its 4XX, and the next one is served."""

from __future__ import annotations

import json
import socket

import pytest
from patience import PATIENCE_S

pytestmark = pytest.mark.interfaces

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"prompt": "hi", "max_tokens": 2}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

STRING_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}


def completion(**fields):
    return COMPLETIONS, PROMPT | fields


def chat(**fields):
    return CHAT, MESSAGES | fields


# Each with what the message must say.
BAD = [
    (*completion(prompt=None), "prompt"),
    (*completion(prompt=3), "prompt"),
    (*completion(prompt=""), "prompt is empty"),
    (*completion(prompt=[]), "prompt"),
    (*completion(prompt=[[]]), "prompt is empty"),
    (*completion(prompt=["a", [1]]), "prompt"),
    (*completion(prompt=[1, 256]), "token id 256"),
    (*completion(prompt=[-1]), "token id -1"),
    (*completion(prompt=[True]), "prompt"),
    (*completion(prompt="a" * 2048), "2048 tokens and the context limit is 2048"),
    (*completion(prompt=["a"] * 3000), "prompt must hold"),
    (*completion(prompt=["a"] * 2000), "sequences on this server, got 2000"),
    (*completion(n=65), "n must be an integer in 1..64"),
    (*completion(n=10**30), "n must be"),
    (*completion(n=0), "n must be"),
    (*completion(n="2"), "n must be"),
    (*completion(request_id="a b"), "request_id must be 1 to 128"),
    (*completion(truncate_prompt_tokens=0), "truncate_prompt_tokens is 0"),
    (*completion(best_of=1, n=2), "best_of is 1; it must be n or more"),
    (*completion(best_of=65), "at most 64"),
    (*completion(length_penalty=0.5), "length_penalty needs use_beam_search"),
    (*completion(use_beam_search=True, stream=True), "use_beam_search cannot be streamed"),
    (*completion(use_beam_search=True, n=11), "n is 11; a beam search may have 10"),
    (*completion(use_beam_search=True, stop="x"), "stop is not supported by beam search"),
    (*completion(use_beam_search=True, best_of=3, n=1), "best_of"),
    (*completion(use_beam_search=True, length_penalty=11), "length_penalty must be a number"),
    (*completion(best_of=2, stream=True), "best_of above n cannot be streamed"),
    (*completion(response_format={"type": "text", "schema": {}}), "response_format.schema"),
    (*completion(suffix="x"), "suffix"),
    (*completion(temperature=3), "temperature"),
    (*completion(temperature=True), "temperature"),
    (*completion(top_p=0), "top_p"),
    (*completion(max_tokens=-1), "max_tokens"),
    (*completion(max_tokens=0), "max_tokens"),
    (*completion(max_tokens=2.5), "max_tokens must be a valid integer, got 2.5."),
    (*completion(min_tokens=9), "min_tokens"),
    (*completion(logprobs=21), "logprobs"),
    (*completion(logprobs=True), "logprobs"),
    (*completion(logit_bias={"a": 1}), "logit_bias"),
    (*completion(logit_bias={"999": 1}), "logit_bias"),
    (*completion(stop=[""]), "stop"),
    (*completion(stop=["a"] * 100), "stop"),
    (*completion(stop_token_ids=[300]), "stop_token_ids"),
    (*completion(allowed_token_ids=[]), "allowed_token_ids"),
    (*completion(bad_words=["a"] * 99), "bad_words"),
    (*completion(seed=2**70), "seed"),
    (*completion(unknown=1), "unknown is not a field"),
    (*completion(temprature=1), "did you mean temperature?"),
    (*completion(stream_options={"include_usage": True}), "stream_options"),
    (*completion(stream=True, prompt_logprobs=1), "prompt_logprobs"),
    (*completion(stream=True, echo=True, logprobs=1), "logprobs"),
    (*completion(structured_outputs={"regex": "("}), "regex"),
    (*completion(structured_outputs={"regex": "a", "choice": ["b"]}), "structured_outputs"),
    (*completion(structured_outputs={"grammar": "no grammar"}), "grammar"),
    (*completion(structured_outputs={"json": {"type": "no such type"}}), "json"),
    (*completion(structured_outputs={}), "structured_outputs"),
    (*completion(response_format={"type": "xml"}), "response_format.type"),
    (*completion(response_format={"type": "json_schema"}), "json_schema"),
    (*chat(messages=[]), "messages"),
    (*chat(messages="hi"), "messages"),
    (*chat(messages=[{"role": "user"}]), "messages[0].content is missing"),
    (*chat(messages=[{"content": "hi"}]), "messages[0].role is missing"),
    (*chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "content[0].type"),
    (*chat(prompt="hi"), "prompt is not a field"),
    (*chat(modalities=["audio"]), "modalities"),
    (*chat(reasoning_effort="low"), "reasoning_effort is not a variable"),
    (*chat(continue_final_message=True, add_generation_prompt=True), "conflict"),
    (*chat(tools=[STRING_TOOL]), "tools[0].function.parameters.type"),
    (*chat(top_logprobs=2), "top_logprobs"),
    (*chat(logprobs=True, top_logprobs=21), "top_logprobs must be"),
    (*chat(max_tokens=2, max_completion_tokens=3), "max_tokens"),
    (*chat(tool_choice="required"), "tool_choice"),
    (*chat(tools=[FUNCTION], tool_choice="maybe"), "tool_choice"),
    (*chat(tools=[FUNCTION] * 2), "tools[1].function.name"),
    (*chat(tools=[{"type": "function", "function": {"name": "a b"}}]), "tools[0].function.name"),
    (
        *chat(tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}]),
        "tools[0].function.parameters",
    ),
    (*chat(chat_template_kwargs={"messages": 1}), "chat_template_kwargs"),
    (*completion(stop_token_ids=["a"] * 1000), "stop_token_ids[0]"),
    (*completion(**{f"unknown{i}": i for i in range(1000)}), "unknown0 is not a field"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"text": "a"}, "text is not a field of this request; use prompt or messages."),
    ("/detokenize", {"tokens": [300]}, "tokens[0] is 300; this model's ids are 0..255."),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
]


def assert_refused(response, status: int, says: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert says in error["message"], error


def test_each_bad_field_is_named(server):
    for path, body, says in BAD:
        assert_refused(server.post(path, body), 400, says)
    assert server.complete(PROMPT)["usage"]["completion_tokens"] > 0


LONG = "é" * 1100  # of two tokens each
LONG_TURN = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        completion(prompt=LONG),
        completion(prompt=[97] * 3000),
        (CHAT, LONG_TURN),
        ("/v1/messages", LONG_TURN),
        ("/v1/responses", {"input": LONG, "max_output_tokens": 2}),
        ("/v1/embeddings", {"input": LONG}),
        ("/v1/score", {"text_1": LONG, "text_2": "hi"}),
    ],
)
def test_a_refused_long_prompt_is_accepted_with_the_field_that_the_refusal_names(
    server, path, body
):
    refused = server.post(path, body)
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert "or set truncate_prompt_tokens to keep a part" in message
    for keep in (-1, 9):
        assert server.post(path, body | {"truncate_prompt_tokens": keep}).status_code == 200
    beyond = server.post(path, body | {"truncate_prompt_tokens": 2048})
    assert beyond.status_code == 400 and "2048 tokens and" in beyond.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "body"),
        (b'{"prompt":', "not JSON"),
        (b"[1]", "body"),
        (b'"prompt"', "body"),
        (b"\xff\xfe\x00", "body"),
        (b"[" * 30_000, "body"),
        (b'{"prompt": "a", "max_tokens": ' + b"1" * 5000 + b"}", "body"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature"),
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"\\udc00": 1}', "body"),
        (b'{"prompt": "a", "prompt\\ud800": 1}', "body"),
        (b'{"prompt": "a", "stop": [1, "\\ud800"]}', "stop[0]"),
    ],
)
def test_what_is_no_good_json(server, body, says):
    headers = {"content-type": "application/json"}
    response = server.client.post(COMPLETIONS, content=body, headers=headers)
    assert_refused(response, 400, says)


def test_variables_of_a_template_may_have_any_name(server):
    path, body = chat(chat_template_kwargs={"self": 1, "cls": 2, "": 3})
    assert server.post(path, body).status_code == 200


def test_binary_in_a_prompt_is_text_like_any(server):
    answer = server.complete({"prompt": "\x00\x01\x7f\u0080\uffff", "max_tokens": 1})
    assert answer["usage"]["prompt_tokens"] > 3


def test_bodies_of_another_type_and_too_large(server):
    text = server.client.post(COMPLETIONS, content=b"hi", headers={"content-type": "text/plain"})
    assert_refused(text, 400, "Content-Type")
    assert_refused(server.client.post(COMPLETIONS, content=b" " * (9 << 20)), 413, "larger")
    chunks = (b" " * (1 << 20) for _ in range(10))
    assert_refused(server.client.post(COMPLETIONS, content=chunks), 413, "larger")


def test_routes_methods_and_models_there_are_not(server):
    assert_refused(server.client.get("/v2/nothing"), 404, "/v2/nothing")
    assert_refused(server.client.get(COMPLETIONS), 405, "GET")
    assert_refused(server.post(*completion(model="gpt-5")), 404, "model 'gpt-5' is not served")


def test_a_server_without_keys_has_no_names_of_other_sites(server):
    headers = {"host": f"evil.example:{server.port}"}
    assert_refused(server.client.get("/v1/models", headers=headers), 403, "--allowed-hosts")


@pytest.mark.parametrize("given", ["a b", "x" * 129, "é"])
def test_request_ids_that_no_log_should_have(server, given):
    """A proxy's is replaced, that of a body is refused."""
    response = server.client.get("/version", headers={"x-request-id": given.encode()})
    assert response.status_code == 200 and len(response.headers["x-request-id"]) == 32
    assert_refused(server.post(*completion(request_id=given)), 400, "request_id")


def test_headers_too_large_are_refused_and_the_port_lives(server):
    for lines in (b"X: " + b"a" * (1 << 20), b"X: a\r\n" * 100_000, b"no header at all \xff"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as raw:
            try:
                raw.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n" + lines + b"\r\n\r\n")
                answer = raw.recv(100)
            except ConnectionError:
                continue  # It would not even read them.
            assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431")) or not answer
    assert server.client.get("/health").status_code == 200


def test_an_id_in_use_is_served_beside_it(server):
    """A proxy may give one id to several requests."""
    body = PROMPT | {"max_tokens": 200, "ignore_eos": True, "stream": True}
    headers = {"x-request-id": "twice"}
    with server.client.stream("POST", COMPLETIONS, json=body, headers=headers) as first:
        second = server.post(COMPLETIONS, PROMPT, **headers)
        assert second.status_code == 200
        assert first.headers["x-request-id"] == second.headers["x-request-id"] == "twice"
        *_, last = [line for line in first.iter_lines() if line]
    assert last == "data: [DONE]"


def test_the_log_has_numbers_and_no_contents(server):
    secret = "a very private matter"
    server.post(COMPLETIONS, {"prompt": secret, "max_tokens": 3}, **{"x-request-id": "logged-1"})
    server.wait_logged("id=logged-1")
    (line,) = [line for line in server.text().splitlines() if "id=logged-1" in line]
    for part in (
        "status=200",
        "prompt_tokens=21",
        "output_tokens=",
        "ttft_s=",
        "e2e_s=",
        "finish=",
    ):
        assert part in line
    assert secret not in server.text()


def test_answers_are_json_that_others_read(server):
    response = server.post(COMPLETIONS, PROMPT | {"logprobs": 20, "seed": 1})
    json.loads(response.text, parse_constant=lambda name: pytest.fail(name))
