"""From bodies to calls and from outputs to answers, without an engine."""

from __future__ import annotations

import json
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.errors import RequestError
from jaxserve.core.outputs import CompletionOutput, Delta, Logprob, RequestMetrics, RequestOutput
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.protocol.endpoints import ENDPOINTS
from jaxserve.protocol.logprobs import LEAST_LOGPROB
from jaxserve.protocol.model import Model

COMPLETIONS, CHAT = ENDPOINTS["/v1/completions"], ENDPOINTS["/v1/chat/completions"]
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="session")
def model(chat_model):
    checkpoint = open_checkpoint(chat_model)
    return Model(("tiny", "alias"), checkpoint.tokenizer(), 256, 2048, {"temperature": 0.5})


def output(call, choices: list[list[int]], number: int = 0) -> RequestOutput:
    """An output of these token ids, which end by themselves."""
    decode = call.model.tokenizer.decode
    found = [
        CompletionOutput(index, decode(token_ids), tuple(token_ids), finish_reason="stop")
        for index, token_ids in enumerate(choices)
    ]
    prompt = tuple(call.prompts[number].token_ids)
    return RequestOutput("r", None, prompt, found, True, RequestMetrics(0, cached_tokens=1))


def test_defaults_are_the_models_and_then_the_endpoints(model):
    completion = COMPLETIONS.parse({"prompt": "hi"}, model).params
    assert (completion.temperature, completion.max_tokens) == (0.5, 16)
    chat = CHAT.parse({"messages": MESSAGES, "temperature": 0, "model": "alias"}, model).params
    assert (chat.temperature, chat.max_tokens) == (0, None)
    null = COMPLETIONS.parse({"prompt": "hi", "temperature": None, "stop": None}, model).params
    assert null == completion


def test_the_cache_salt_is_the_engines_and_the_user_is_not(model):
    for endpoint, rest in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": MESSAGES})):
        for salt, known in (("alice", "alice"), ("", None), (None, None)):
            call = endpoint.parse(rest | {"cache_salt": salt, "user": "u"}, model)
            assert call.cache_salt == known


def test_every_field_of_sampling_arrives(model):
    fields = {
        "n": 2,
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "seed": 7,
        "stop": ["x"],
        "stop_token_ids": [4],
        "ignore_eos": True,
        "min_tokens": 1,
        "max_tokens": 9,
        "prompt_logprobs": 2,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "allowed_token_ids": [1, 2],
        "bad_words": ["no"],
        "priority": -1,
    }
    for endpoint, rest in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": MESSAGES})):
        params = endpoint.parse(fields | rest | {"logit_bias": {"5": 1}}, model).params
        assert params.logit_bias == {5: 1.0}
        for name, value in fields.items():
            given = getattr(params, name)
            assert (list(given) if isinstance(given, tuple) else given) == value, name


def test_forms_of_structured_outputs(model):
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    for fields, wanted in (
        ({"response_format": form}, json.dumps(schema)),
        ({"structured_outputs": {"json": schema}}, json.dumps(schema)),
    ):
        made = CHAT.parse({"messages": MESSAGES, **fields}, model).params.structured_outputs
        assert json.loads(made.json) == json.loads(wanted)
    text = CHAT.parse({"messages": MESSAGES, "response_format": {"type": "text"}}, model)
    assert text.params.structured_outputs is None
    anything = {"messages": MESSAGES, "response_format": {"type": "json_object"}}
    assert CHAT.parse(anything, model).params.structured_outputs.json_object
    with pytest.raises(RequestError, match="conflict"):
        CHAT.parse(anything | {"structured_outputs": {"regex": "a"}}, model)


def test_choices_of_several_prompts_are_numbered(model):
    call = COMPLETIONS.parse({"prompt": ["a", "b"], "n": 2, "return_token_ids": True}, model)
    outputs = [output(call, [[70], [71]], 0), output(call, [[72], [73, 74]], 1)]
    body = call.response(outputs, "id", 5)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["token_ids"] for choice in body["choices"]] == [[70], [71], [72], [73, 74]]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_logprobs_beyond_what_json_can_say(model):
    call = COMPLETIONS.parse({"prompt": "a", "logprobs": 1}, model)
    entry = {70: Logprob(float("-inf"), 9, "g"), 71: Logprob(-0.5, 1, "h")}
    choice = CompletionOutput(0, "g", (70,), logprobs=[entry], finish_reason="stop")
    found = RequestOutput("r", None, (68,), [choice], True, RequestMetrics(0))
    logprobs = call.response([found], "id", 5)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [LEAST_LOGPROB]
    assert logprobs["top_logprobs"] == [{"h": -0.5, "g": LEAST_LOGPROB}]
    json.dumps(logprobs, allow_nan=False)


@given(st.text(alphabet="aé€😀", max_size=8), st.text(alphabet="aé€😀", min_size=1, max_size=8))
def test_offsets_are_those_of_the_text(model, prompt, text):
    """Here a token is a byte, of which a character has up to four."""
    body = {"prompt": "x" + prompt, "logprobs": 0}
    tokenizer = model.tokenizer
    token_ids = tokenizer.encode(text)
    wanted = [place for place, char in enumerate(text) for _ in char.encode()]
    call = COMPLETIONS.parse(body, model)
    before = call.prompts[0].token_ids
    entries = [{token: Logprob(-1.0, 1, "")} for token in token_ids]
    choice = CompletionOutput(0, text, tuple(token_ids), logprobs=entries, finish_reason="stop")
    asked = [None, *({token: Logprob(-1.0, 1, "")} for token in before[1:])]
    found = RequestOutput("r", None, tuple(before), [choice], True, RequestMetrics(0), asked)

    def offsets(call) -> list[int]:
        return call.response([found], "id", 5)["choices"][0]["logprobs"]["text_offset"]

    assert offsets(call) == wanted
    chunks, streamed = call.chunks("id", 5), []
    for token, entry in zip(token_ids, entries):
        for chunk in chunks.add(0, [Delta(0, "", (token,), [entry])]):
            streamed += chunk["choices"][0]["logprobs"]["text_offset"]
    assert streamed == wanted
    echoed = offsets(COMPLETIONS.parse(body | {"echo": True}, model))
    assert echoed[len(before) :] == [len(prompt) + 1 + place for place in wanted]
    assert echoed[0] == 0 and echoed == sorted(echoed)


TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@given(st.data())
def test_chunks_add_up_to_the_answer(model, data):
    """However the text is cut, and whether there is a call in it."""
    text = data.draw(st.sampled_from(["plain text", "so: " + CALL, CALL, "<tool_", ""]))
    body = {"messages": MESSAGES, "stream": True, "tools": TOOLS, "return_token_ids": True}
    call = CHAT.parse(body | {"stream_options": {"include_usage": True}}, model)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    places = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    choice = CompletionOutput(0, text, tuple(range(len(pieces))), finish_reason="stop")
    found = RequestOutput("r", None, (68,), [choice], True, RequestMetrics(0))
    whole = call.response([found], "id", 5)["choices"][0]
    chunks = call.chunks("id", 5)
    made = list(chunks.begin())
    for place, piece in enumerate(pieces):
        last = "stop" if place == len(pieces) - 1 else None
        made += chunks.add(0, [Delta(0, piece, (place,), finish_reason=last)])
    made += chunks.end([found])
    *told, counted = made
    choices = [chunk["choices"][0] for chunk in told]
    content = "".join(c["delta"].get("content", "") for c in choices)
    calls = [each for c in choices for each in c["delta"].get("tool_calls", [])]
    assert content.strip() == (whole["message"]["content"] or "").strip()
    without_index = [{k: v for k, v in each.items() if k != "index"} for each in calls]
    assert without_index == whole["message"].get("tool_calls", [])
    assert choices[-1]["finish_reason"] == whole["finish_reason"]
    assert [*chain.from_iterable(c["token_ids"] for c in choices[1:])] == whole["token_ids"]
    assert counted["usage"]["completion_tokens"] == len(pieces)


def test_a_template_without_tools_serves_forced_calls_alone(model):
    import dataclasses

    bare = dataclasses.replace(model, tokenizer=_without_template_tools(model.tokenizer))
    with pytest.raises(RequestError, match="chat template has no tools"):
        CHAT.parse({"messages": MESSAGES, "tools": TOOLS}, bare)
    forced = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
    assert CHAT.parse(forced, bare).params.structured_outputs.json
    assert CHAT.parse(forced | {"tool_choice": "none"}, bare).params.structured_outputs is None


def _without_template_tools(tokenizer):
    import copy

    other = copy.copy(tokenizer)
    other._chat_templates = {"default": "{{ messages[0].content }}"}
    return other
