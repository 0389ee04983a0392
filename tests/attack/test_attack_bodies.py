"""Hostile bodies: each is answered soon, and not by an error of the server's own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.protocol.chat.request import ChatCompletionRequest
from jaxserve.protocol.completions import CompletionRequest

pytestmark = pytest.mark.attack

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
GROWTH_BYTES = 64 << 20
BOUND_S = 20.0
"""For the attacker's own answer, on one core with everything else that runs there."""


def completion(**fields: Any) -> tuple[str, Any]:
    return COMPLETIONS, {"prompt": "a", "max_tokens": 1} | fields


def chat(**fields: Any) -> tuple[str, Any]:
    return CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1} | fields


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def nested(depth: int, make: Callable[[Any], Any], inner: Any) -> Any:
    for _ in range(depth):
        inner = make(inner)
    return inner


def schema(value: Any) -> tuple[str, Any]:
    return completion(structured_outputs={"json": value})


def regex(pattern: str) -> tuple[str, Any]:
    return completion(structured_outputs={"regex": pattern})


def grammar(text: str) -> tuple[str, Any]:
    return completion(structured_outputs={"grammar": text})


LOOP = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
TREE = {"$defs": {"t": {"anyOf": [{"$ref": "#/$defs/t"}] * 50}}, "$ref": "#/$defs/t"}
LADDER = {"$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)}}
LADDER["$defs"]["a40"] = {"type": "string"}
LADDER["$ref"] = "#/$defs/a0"

HOSTILE: list[tuple[str, Any]] = [
    # Prompts
    completion(prompt="a" * 7_000_000),
    completion(prompt="\U0001f4a9" * 1_500_000),
    completion(prompt="\u0300" * 2_000_000),
    completion(prompt=[3] * 1_000_000),
    completion(prompt=[[3]] * 100_000),
    completion(prompt=["a"] * 2048, n=64),
    completion(prompt=["a" * 2000] * 2000),
    completion(prompt=[-1, 1 << 70]),
    completion(prompt=[1e300]),
    completion(prompt=[[["a"]]]),
    completion(prompt={"a": "b"}),
    completion(prompt="a" * 100_000, truncate_prompt_tokens=5),
    completion(prompt=[3] * 500_000, truncate_prompt_tokens=-1),
    ("/tokenize", {"prompt": "a" * 7_000_000}),
    ("/tokenize", {"messages": [{"role": "user", "content": "a "}] * 100_000}),
    ("/detokenize", {"tokens": [3] * 1_000_000}),
    ("/detokenize", {"tokens": [1 << 400]}),
    # Numbers
    completion(max_tokens=10**18),
    completion(max_tokens=10**400),
    completion(n=10**18),
    completion(temperature=1e308),
    completion(top_p=5e-324),
    completion(top_k=-(10**30)),
    completion(seed=-(2**63)),
    completion(seed=2**64),
    completion(logprobs=10**9),
    completion(priority=-(2**40)),
    completion(min_tokens=10**9),
    completion(truncate_prompt_tokens=10**18),
    completion(repetition_penalty=1e-300),
    # Lists
    completion(stop=["a"] * 100_000),
    completion(stop="a" * 1_000_000),
    completion(stop_token_ids=list(range(200)) * 1000),
    completion(bad_words=["a b"] * 100_000),
    completion(bad_words=["a" * 1_000_000]),
    completion(logit_bias={str(i): 1 for i in range(200_000)}),
    completion(allowed_token_ids=[3] * 500_000),
    completion(**{f"f{i}": i for i in range(200_000)}),
    completion(cache_salt="s" * 1_000_000),
    completion(user="u" * 1_000_000),
    completion(metadata=nested(900, lambda inner: {"a": inner}, 1)),
    completion(model="m" * 1_000_000),
    # Regular expressions and grammars
    regex("(a+)+$"),
    regex("(a|a)*(b|b)*" * 200),
    regex("a{1000000}"),
    regex("((a{100}){100}){100}"),
    regex("(a?){500}a{500}"),
    regex("(" * 5000 + "a" + ")" * 5000),
    regex("[" * 10_000),
    regex("(?=a)b"),
    regex(r"\p{L}{2000}"),
    regex(".*" * 2000),
    regex("a" * 1_000_000),
    regex("(?i)" + "(foo|bar)" * 5000),
    grammar("start: start"),
    grammar("start: a\na: b\nb: a"),
    grammar('start: "a" start "b" | start start |'),
    grammar("start: x\n" + "\n".join(f'x{i}: x{i + 1} x{i + 1} "a"' for i in range(5000))),
    grammar("start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    grammar("start: /(a+)+/\n" * 2000),
    grammar("x" * 1_000_000),
    grammar("\x00"),
    completion(structured_outputs={"choice": ["a" * 1000] * 5000}),
    completion(structured_outputs={"choice": [str(i) for i in range(100_000)]}),
    # Schemas
    schema(LOOP),
    schema(TREE),
    schema(LADDER),
    schema({"$ref": "#"}),
    schema({"$ref": "http://127.0.0.1:1/evil.json"}),
    schema({"$ref": "file:///etc/passwd"}),
    schema({"$ref": "#/a" + "/a" * 100_000}),
    schema(nested(900, lambda inner: {"type": "array", "items": inner}, {})),
    schema(nested(400, lambda inner: {"allOf": [inner]}, {})),
    schema(nested(14, lambda inner: {"anyOf": [inner, inner]}, {"type": "string"})),
    schema({"enum": list(range(200_000))}),
    schema({"type": "array", "minItems": 10**9}),
    schema({"type": "array", "items": {"type": "integer"}, "minItems": 2000, "maxItems": 10**6}),
    schema({"type": "string", "minLength": 10**9}),
    schema({"type": "string", "pattern": "(a+)+$"}),
    schema({"type": "string", "pattern": "(" * 3000}),
    schema({"type": "integer", "multipleOf": 10**30}),
    schema({"type": "integer", "minimum": -(10**400), "maximum": 10**400}),
    schema({"type": "object", "properties": {f"p{i}": {} for i in range(50_000)}}),
    schema({"type": "object", "patternProperties": {"(a+)+$": {}}}),
    schema({"type": "object", "required": [f"p{i}" for i in range(20_000)]}),
    schema({"type": ["object"] * 1000}),
    schema({"const": "\x00" * 10_000}),
    schema("{" * 10_000),
    chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": TREE}}),
    # Conversations and tools
    chat(messages=[{"role": "user", "content": "a"}] * 100_000),
    chat(messages=[{"role": "r" * 1_000_000, "content": "a"}]),
    chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}] * 100_000}]),
    chat(messages=[{"role": "user", "content": "{{ 99 ** 99999999 }}"}]),
    chat(messages=[{"role": "user", "content": "{% for i in range(10**9) %}{% endfor %}"}]),
    chat(messages=[{"role": "user", "content": "slow"}]),
    chat(messages=[{"role": "user", "content": "a", "__class__": {"__init__": 1}}]),
    chat(chat_template_kwargs={"a": nested(900, lambda inner: [inner], 1)}),
    chat(chat_template_kwargs={f"v{i}": "x" * 100 for i in range(20_000)}),
    chat(chat_template_kwargs={"range": 1, "namespace": 2, "raise_exception": 3, "loop": 4}),
    chat(tools=[tool(type="object")] * 10_000),
    chat(tools=[tool(**LOOP)], tool_choice="required"),
    chat(tools=[tool(**TREE)], tool_choice="required"),
    chat(tools=[tool(**nested(300, lambda inner: {"allOf": [inner]}, {}))]),
    chat(tools=[tool(type="object", properties={"a": {"pattern": "(a+)+$"}})]),
    chat(tools=[{"type": "function", "function": {"name": "n" * 1_000_000}}]),
    chat(tools=[{"type": "function", "function": {"name": "f", "description": "d" * 1_000_000}}]),
]

RAW = [
    b"",
    b"\x00",
    b"null",
    b"[" * 1_000_000,
    b'{"a":' * 500_000,
    b'{"prompt":' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"prompt": "a", "n": ' + b"9" * 1_000_000 + b"}",
    b'{"prompt": "a", "temperature": 1e' + b"9" * 1000 + b"}",
    b'{"prompt": "a", "temperature": -Infinity}',
    b'{"prompt": "' + b"\\u0000" * 500_000 + b'"}',
    b'{"prompt": "\\ud800\\ud800"}',
    b'{"prompt": "a", ' + b'"max_tokens": 1, ' * 200_000 + b'"n": 1}',
    b'{"' + b"k" * 7_000_000 + b'": 1}',
    b"\xef\xbb\xbf{}",
    '{"prompt": "a"}'.encode("utf-16"),
    b'{"prompt": "\xc3\x28"}',
    b'{"prompt": "a"} {"prompt": "b"}',
    b"prompt=a&max_tokens=1",
    b"--x\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n--x--",
    b"\x1f\x8b\x08" + b"\x00" * 1000,
]


def test_hostile_bodies(attacked):
    """Four at a time, as far as they fit a request: larger ones are refused for their size. The
    second time they take no more memory."""

    def post(path: str, body: Any) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        begin = time.monotonic()
        answer = attacked.client.post(path, content=content, headers=JSON)
        what = path, content[:80], answer.status_code, answer.text[:200]
        assert time.monotonic() - begin < BOUND_S, what
        assert answer.status_code in (200, 400, 404, 413, 422, 429), what
        assert len(answer.content) < 10_000_000
        if answer.status_code != 200:
            assert len(answer.json()["error"]["message"]) < 4000, what

    bodies = [*HOSTILE, *((path, raw) for path in (COMPLETIONS, CHAT) for raw in RAW)]
    memory = []
    for _ in range(2):
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(post, *body) for body in bodies]:
                done.result()
        attacked.wait_idle()
        memory.append(attacked.metrics()["process_resident_memory_bytes",])
    print(f"memory: {memory}")
    assert memory[1] - memory[0] < GROWTH_BYTES


def large(value: str) -> bytes:
    """A body of 8 MB with so many values in its prompt."""
    part = value.encode() + b","
    return b'{"max_tokens": 1, "prompt": [' + part * (8_000_000 // len(part)) + b"3]}"


@pytest.mark.parametrize("value", ["3", "[3]", "[]", '"a"', "{}"])
def test_many_large_bodies_at_once(attacked, value):
    """Each takes tenths of a second to parse, in the thread that serves all others."""
    content = large(value)
    with ThreadPoolExecutor(16) as pool:
        posts = [
            pool.submit(attacked.client.post, COMPLETIONS, content=content, headers=JSON)
            for _ in range(16)
        ]
        for post in posts:
            assert post.result().status_code in (400, 413), post.result().text


def test_large_tools_are_refused_before_any_work(attacked):
    properties = {f"{number:0>150}": {"type": "string"} for number in range(20_000)}
    body = chat(tools=[tool(type="object", properties=properties)])[1]
    content = json.dumps(body).encode()
    assert len(content) > 3 << 20
    with ThreadPoolExecutor(6) as pool:
        posts = [
            pool.submit(attacked.client.post, path, content=content, headers=JSON)
            for path in (CHAT, CHAT, CHAT, CHAT, CHAT, "/tokenize")
        ]
        for post in posts:
            response = post.result()
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            if "max_tokens" not in error["message"]:  # which /tokenize does not have
                assert error["param"] == "tools" and "4096 JSON values" in error["message"]


def test_long_texts_are_refused_before_they_are_tokenized(attacked):
    text = "one more word " * 500_000
    for path, body in (
        (COMPLETIONS, {"prompt": text}),
        (COMPLETIONS, {"prompt": [3] * 1_000_000}),
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": [{"role": "user", "content": text}]}),
    ):
        response = attacked.post(path, body)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "shorten it" in error["message"]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([0, -1, 1, 2, 64, 1.5, 1e300, 10**18, 2**63, "", "a", "\x00", "\U0001f4a9"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
FIELDS = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}
NAMES = st.sampled_from(sorted(FIELDS))


@settings(max_examples=400, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from([COMPLETIONS, CHAT]), fields=st.dictionaries(NAMES, VALUES, max_size=4))
def test_any_fields(attacked, path, fields):
    base = completion() if path == COMPLETIONS else chat()
    answer = attacked.client.post(path, json=base[1] | fields)
    assert answer.status_code in (200, 400, 404, 422, 429), (fields, answer.text)
