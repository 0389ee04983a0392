"""From bodies to calls and from outputs to answers, without an engine."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.errors import RequestError
from jaxserve.core.requests.outputs import (
    CompletionOutput,
    Delta,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.offline.requests import parse as batch_request
from jaxserve.protocol.endpoints import ENDPOINTS, Endpoint
from jaxserve.protocol.errors import reply_to
from jaxserve.protocol.logprobs import MIN_LOGPROB
from jaxserve.protocol.messages_api.request import MessagesRequest
from jaxserve.protocol.model import Model
from jaxserve.server.responses import warning_of

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
        ({"guided_json": schema}, json.dumps(schema)),
        ({"json_schema": schema}, json.dumps(schema)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
            json.dumps(schema),
        ),
    ):
        made = CHAT.parse({"messages": MESSAGES, **fields}, model).params.structured_outputs
        assert json.loads(made.json) == json.loads(wanted)
    text = CHAT.parse({"messages": MESSAGES, "response_format": {"type": "text"}}, model)
    assert text.params.structured_outputs is None
    anything = {"messages": MESSAGES, "response_format": {"type": "json_object"}}
    assert CHAT.parse(anything, model).params.structured_outputs.json_object
    with pytest.raises(RequestError, match="conflict"):
        CHAT.parse(anything | {"structured_outputs": {"regex": "a"}}, model)
    with pytest.raises(RequestError, match="guided_regex and guided_choice conflict"):
        CHAT.parse({"messages": MESSAGES, "guided_regex": "a", "guided_choice": ["a"]}, model)
    guided = CHAT.parse({"messages": MESSAGES, "guided_choice": ["a"]}, model)
    assert guided.params.structured_outputs.choice == ("a",)
    of_llama_cpp = CHAT.parse({"messages": MESSAGES, "grammar": 'root ::= "a"'}, model)
    assert of_llama_cpp.params.structured_outputs.grammar == 'root ::= "a"'
    assert of_llama_cpp.names["structured_outputs.grammar"] == "grammar"


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
    assert logprobs["token_logprobs"] == [MIN_LOGPROB]
    assert logprobs["top_logprobs"] == [{"h": -0.5, "g": MIN_LOGPROB}]
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


def test_an_echoed_prompt_keeps_its_special_tokens(smollm2_path):
    tokenizer = open_checkpoint(smollm2_path).tokenizer()
    model = Model(("real",), tokenizer, tokenizer.vocab_size, 2048, {})
    text = "<|im_start|>user\nhé<|im_end|>"
    token_ids = tokenizer.encode(text)
    for prompt in (text, token_ids):
        body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0}
        call = COMPLETIONS.parse(body, model)
        assert call.echoed(0) == text
        asked = [None, *({token: Logprob(-1.0, 1, "")} for token in token_ids[1:])]
        choice = CompletionOutput(0, "", (), logprobs=[])
        found = RequestOutput("r", None, tuple(token_ids), [choice], True, RequestMetrics(0), asked)
        (answer,) = call.response([found], "id", 5)["choices"]
        offsets = answer["logprobs"]["text_offset"]
        assert answer["text"] == text and offsets[:2] == [0, len("<|im_start|>")]
        assert offsets[-1] == len(text) - len("<|im_end|>")


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
    calls: list[dict] = []
    for each in chain.from_iterable(c["delta"].get("tool_calls", []) for c in choices):
        if each["index"] == len(calls):
            calls.append(copy.deepcopy(each))
        else:
            calls[each["index"]]["function"]["arguments"] += each["function"]["arguments"]
    assert content.strip() == (whole["message"]["content"] or "").strip()
    without_index = [{k: v for k, v in each.items() if k != "index"} for each in calls]
    assert without_index == whole["message"].get("tool_calls", [])
    assert choices[-1]["finish_reason"] == whole["finish_reason"]
    assert [*chain.from_iterable(c["token_ids"] for c in choices[1:])] == whole["token_ids"]
    assert counted["usage"]["completion_tokens"] == len(pieces)


def test_ids_of_calls_are_short_and_each_its_own(model):
    """OpenAI takes back at most 40 characters. Each answer has two calls, and the chat two
    answers."""

    def answered(endpoint, body, request_id, n=1):
        call = endpoint.parse(body, model)
        choices = [CompletionOutput(i, CALL + CALL, (7,), finish_reason="stop") for i in range(n)]
        found = RequestOutput("r", None, (68,), choices, True, RequestMetrics(0))
        return call.response([found], request_id, 5)

    chat = {"messages": MESSAGES, "n": 2, "tools": TOOLS}
    responses = {"input": "Hi", "tools": [{"type": "function", "name": "f"}]}
    claude = {"messages": MESSAGES, "max_tokens": 9, "tools": [{"name": "f", "input_schema": {}}]}
    for request_id in ("0" * 32, "x" * 128):
        choices = answered(CHAT, chat, request_id, n=2)["choices"]
        items = answered(ENDPOINTS["/v1/responses"], responses, request_id)["output"]
        blocks = answered(Endpoint(MessagesRequest), claude, request_id)["content"]
        of_chat = [each["id"] for c in choices for each in c["message"]["tool_calls"]]
        of_response = [item["call_id"] for item in items]
        of_message = [block["id"] for block in blocks]
        assert len(set(of_chat)) == 4 and len(set(of_response)) == len(set(of_message)) == 2
        for name in (*of_chat, *of_response, *of_message):
            assert re.fullmatch("call_[0-9a-f]{24}", name)


def test_a_template_without_tools_serves_forced_calls_alone(model):
    tokenizer = _with_template(model.tokenizer, "{{ messages[0].content }}")
    bare = dataclasses.replace(model, tokenizer=tokenizer)
    auto = CHAT.parse({"messages": MESSAGES, "tools": TOOLS}, bare)
    assert auto.tool_use is None and "chat template has no tools" in auto.ignored_tools
    line = {"custom_id": "a", "messages": MESSAGES, "tools": TOOLS}
    assert "tools are ignored: this model's chat template" in warning_of(auto)["warning"]
    with pytest.raises(RequestError) as refusal:
        batch_request(line, 1, bare, seed=0)
    assert str(refusal.value) == (
        "tools are refused: this model's chat template has no tools; leave them out, or set "
        "tool_choice to required or a named function, which forces a call."
    )
    assert reply_to(refusal.value).param == "tools"
    for choice in ("required", "none"):
        assert batch_request(line | {"tool_choice": choice}, 1, bare, seed=0).prompts
    assert CHAT.parse({"messages": MESSAGES, "tools": TOOLS}, model).ignored_tools is None
    forced = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
    assert CHAT.parse(forced, bare).params.structured_outputs.json
    assert CHAT.parse(forced, bare).ignored_tools is None
    assert CHAT.parse(forced | {"tool_choice": "none"}, bare).params.structured_outputs is None


def _with_template(tokenizer, template: str):
    other = copy.copy(tokenizer)
    other._chat_templates = {"default": template}
    return other


def test_prompts_are_truncated_on_the_side_asked_for(model):
    def tokens(**fields):
        return COMPLETIONS.parse({"prompt": [1, 2, 3, 4]} | fields, model).prompts[0].token_ids

    assert tokens(truncate_prompt_tokens=3) == [2, 3, 4]
    assert tokens(truncate_prompt_tokens=3, truncation_side="right") == [1, 2, 3]
    assert tokens(truncate_prompt_tokens=4) == tokens(truncate_prompt_tokens=-1) == [1, 2, 3, 4]
    long = {"prompt": list(range(100)) * 30, "truncate_prompt_tokens": -1, "max_tokens": 48}
    assert len(COMPLETIONS.parse(long, model).prompts[0].token_ids) == 2000
    chat = CHAT.parse({"messages": MESSAGES, "truncate_prompt_tokens": 5}, model)
    assert model.tokenizer.decode(chat.prompts[0].token_ids) == "tant:"


def test_the_final_message_is_continued_and_echoed(model):
    messages = [*MESSAGES, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "continue_final_message": True, "echo": True, "stream": True}
    call = CHAT.parse(body, model)
    assert call.prompts[0].text == "user: Hiassistant: Well, "
    answer = call.response([output(call, [[72, 73]])], "id", 5)["choices"][0]["message"]
    assert answer["content"] == "Well, " + model.tokenizer.decode([72, 73])
    (first,) = call.chunks("id", 5).begin()
    assert first["choices"][0]["delta"]["content"] == "Well, "
    # Without an assistant's message there is nothing to repeat.
    assert CHAT.parse({"messages": MESSAGES, "echo": True}, model).echoed == ""


def test_logprobs_may_name_tokens_by_id(model):
    body = {"prompt": "a", "logprobs": 1, "return_tokens_as_token_ids": True}
    entry = {70: Logprob(-1.0, 2, "g"), 71: Logprob(-0.5, 1, "h")}
    choice = CompletionOutput(0, "g", (70,), logprobs=[entry], finish_reason="stop")
    found = RequestOutput("r", None, (68,), [choice], True, RequestMetrics(0))
    answer = COMPLETIONS.parse(body, model).response([found], "id", 5)["choices"][0]["logprobs"]
    assert answer["tokens"] == ["token_id:70"]
    assert answer["top_logprobs"] == [{"token_id:71": -0.5, "token_id:70": -1.0}]
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
    call = CHAT.parse(body | {"return_tokens_as_token_ids": True}, model)
    (token,) = call.response([found], "id", 5)["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["top_logprobs"][0]["token"]) == ("token_id:70", "token_id:71")
    assert bytes(token["bytes"]).decode() == model.tokenizer.token_text(70)


def test_fields_that_change_no_answer_are_accepted(model):
    harmless = {
        "user": "u",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "spaces_between_special_tokens": True,
        "cache_prompt": False,
        "id_slot": 0,
        "use_beam_search": False,
    }
    of_chats = {"verbosity": "low", "modalities": ["text"], "parallel_tool_calls": False}
    plain = COMPLETIONS.parse({"prompt": "hi"}, model)
    assert COMPLETIONS.parse({"prompt": "hi"} | harmless, model) == plain
    chat = {"messages": MESSAGES}
    assert CHAT.parse(chat | harmless | of_chats, model) == CHAT.parse(chat, model)


def test_reasoning_effort_is_a_variable_of_templates_that_have_it(model):
    tokenizer = _with_template(model.tokenizer, "{{ reasoning_effort }} {{ messages[0].content }}")
    reasons = dataclasses.replace(model, tokenizer=tokenizer)
    body = {"messages": MESSAGES, "reasoning_effort": "low"}
    assert CHAT.parse(body, reasons).prompts[0].text == "low Hi"


def test_channels_are_taken_apart_by_their_marks(model):
    """Which are special tokens, and so left out of other answers."""
    template = "{% if tools %}{{ tools[0].function.name }}{% endif %}<|start|>assistant<|channel|>"
    channels = dataclasses.replace(model, tokenizer=_with_template(model.tokenizer, template))
    parameters = {"type": "object", "properties": {}}
    tool = {"type": "function", "function": {"name": "wait", "parameters": parameters}}
    call = CHAT.parse({"messages": MESSAGES, "tools": [tool]}, channels)
    assert not call.params.skip_special_tokens and call.ignored_tools is None
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    called = "<|channel|>commentary to=functions.wait<|message|>{}"
    tokens = model.tokenizer.encode(thought + called, add_special_tokens=False)
    body = call.response([output(call, [tokens])], "r", 0)
    (choice,) = body["choices"]
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "wait", "arguments": "{}"}
    assert choice["finish_reason"] == "tool_calls"
    reasoned = len(model.tokenizer.encode(thought, add_special_tokens=False))
    details = body["usage"]["completion_tokens_details"]
    assert abs(details["reasoning_tokens"] - reasoned) <= 1


def test_reasoning_before_a_call_is_sent_back_to_gpt_oss(model):
    """Its template calls it thinking, and refuses it beside content."""
    template = "{% for m in messages %}[{{ m.thinking }}|{{ m.content }}]{% endfor %}"
    channels = dataclasses.replace(model, tokenizer=_with_template(model.tokenizer, template))
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [call]}
    messages = [
        message,
        message | {"content": "So."},
        {"role": "assistant", "reasoning_content": "Hm.", "content": "Yes."},
    ]
    body = {"messages": messages, "add_generation_prompt": False}
    assert CHAT.parse(body, channels).prompts[0].text == "[Hm.|][|So.][|Yes.]"


def test_what_other_servers_put_into_messages_passes(model):
    """LiteLLM's tool loop sends back what it made of an answer; a template sees fields it knows."""
    function = {"name": "f", "arguments": "{}", "provider_specific_fields": None}
    call = {"id": "1", "type": "function", "function": function, "caller": "x"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"a": 1}}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "provider_specific_fields": {"refusal": None},
            "annotations": [{"type": "url_citation"}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "done", "mood": "good"},
    ]
    text = CHAT.parse({"messages": messages}, model).prompts[0].text
    assert text == "user: Hiassistant: {}tool: doneassistant:"
    moody = _with_template(model.tokenizer, "{{ messages[-1].mood }}")
    called = CHAT.parse({"messages": messages}, dataclasses.replace(model, tokenizer=moody))
    assert called.prompts[0].text == "good"
    with pytest.raises(RequestError, match=r"messages\[0\] must have names"):
        CHAT.parse({"messages": [MESSAGES[0] | {"\ud800": 1}]}, model)
