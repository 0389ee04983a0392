"""Reasoning, and templates of requests, from bodies to answers in every format."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from jaxserve.core.errors import ChatTemplateError, RequestError
from jaxserve.core.requests.outputs import CompletionOutput, Delta, RequestMetrics, RequestOutput
from jaxserve.core.settings.chat_settings import ChatSettings
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.offline.journal import Result
from jaxserve.offline.requests import parse as batch_request
from jaxserve.offline.totals import JobTotals
from jaxserve.protocol.chat.request import ChatCompletionRequest
from jaxserve.protocol.completions import CompletionRequest
from jaxserve.protocol.errors import ErrorReply, FieldError
from jaxserve.protocol.messages_api.request import MessagesRequest
from jaxserve.protocol.model import Model
from jaxserve.protocol.responses_api.request import ResponsesRequest
from jaxserve.protocol.tokenizing import TokenizeRequest

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}|{% endfor %}{% if enable_thinking is not false %}<think>\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Hi"}]
TEXT = "Because.\n</think>\n\nYes."
NUM_TOKENS = len("Because.\n</think>")  # A token is a byte here.


@pytest.fixture(scope="module")
def model(chat_model):
    tokenizer = copy.copy(open_checkpoint(chat_model).tokenizer())
    tokenizer._chat_templates = {"default": TEMPLATE}
    return Model(("tiny",), tokenizer, 256, 2048, {})


def output(model: Model, text: str) -> RequestOutput:
    token_ids = tuple(model.tokenizer.encode(text, add_special_tokens=False))
    choice = CompletionOutput(0, text, token_ids, finish_reason="stop")
    return RequestOutput("r", None, (5, 6), [choice], True, RequestMetrics(0, cached_tokens=1))


def streamed(call, text: str) -> list[dict]:
    """All chunks of a text that comes in single characters."""
    chunks = call.chunks("r", 5)
    made = list(chunks.begin())
    for place, character in enumerate(text):
        reason = "stop" if place == len(text) - 1 else None
        made += chunks.add(0, [Delta(0, character, (7,), finish_reason=reason)])
    return [
        *made,
        *chunks.end([output(call.chat.model if hasattr(call, "chat") else call.model, text)]),
    ]


def parse(kind, model: Model, **fields):
    return kind.model_validate(fields).parse(model)


def test_chats_have_it_beside_the_content(model):
    call = parse(ChatCompletionRequest, model, messages=MESSAGES, stream=True)
    body = call.response([output(model, TEXT)], "r", 5)
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Because.", "Yes.")
    assert message["reasoning"] == message["reasoning_content"]
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": NUM_TOKENS}
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed(call, TEXT)]
    for name in ("reasoning", "reasoning_content", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == message[name]


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_the_template_gets_it_by_either_name(model, name):
    turn = {"role": "assistant", "content": "Yes.", name: "Because."}
    call = parse(ChatCompletionRequest, model, messages=[*MESSAGES, turn, *MESSAGES])
    assert call.prompts[0].text == "Hi|<think>Because.</think>Yes.|Hi|<think>\n"


@pytest.mark.parametrize("echo", [False, True])
def test_a_message_is_continued_within_it(model, echo):
    turn = {"role": "assistant", "content": "Well. <think>\nBecause it"}
    fields = {"continue_final_message": True, "echo": echo, "stream": True}
    call = parse(ChatCompletionRequest, model, messages=[*MESSAGES, turn], **fields)
    assert call.prompts[0].text == "Hi|Well. <think>\nBecause it"
    text = " is.</think>Yes."
    body = call.response([output(model, text)], "r", 5)
    message = body["choices"][0]["message"]
    before, begun = ("Well. ", "Because it") if echo else ("", "")
    assert (message["reasoning"], message["content"]) == (f"{begun} is.", f"{before}Yes.")
    reasoned = len(" is.</think>")
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": reasoned}
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed(call, text)]
    for part in ("reasoning", "content"):
        assert "".join(delta.get(part, "") for delta in deltas) == message[part]


@pytest.mark.parametrize("ended", ["Because.</think>", "What is it?"])
def test_a_message_is_continued_after_it(model, ended):
    turn = {"role": "assistant", "content": ended}
    fields = {"continue_final_message": True, "messages": [*MESSAGES, turn]}
    call = parse(ChatCompletionRequest, model, **fields)
    message = call.response([output(model, " Yes.")], "r", 5)["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (None, " Yes.")


def test_the_template_that_is_rendered_decides_on_thinking(model):
    """That of tools only where the model gets them."""
    other = copy.copy(model.tokenizer)
    other._chat_templates = {"default": TEMPLATE, "tool_use": "{{ tools }}{{ messages }}"}
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    fields = {"messages": MESSAGES, "max_tokens": 99, "thinking": thinking, "tools": tools}
    chosen = dataclasses.replace(model, tokenizer=other)
    for choice, budget in (("none", 1024), ("any", None)):
        call = parse(MessagesRequest, chosen, tool_choice={"type": choice}, **fields)
        assert call.params.thinking_token_budget == budget, choice


def test_responses_have_it_as_an_item(model):
    call = parse(ResponsesRequest, model, input="Hi", stream=True)
    body = call.response([output(model, TEXT)], "r", 5)
    thought, message = body["output"]
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "Because.")
    assert message["content"][0]["text"] == "Yes."
    assert body["usage"]["output_tokens_details"] == {"reasoning_tokens": NUM_TOKENS}
    events = streamed(call, TEXT)
    assert events[-1]["response"] == body
    deltas = [e["delta"] for e in events if e["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Because."
    again = parse(ResponsesRequest, model, input=[*MESSAGES, *body["output"], *MESSAGES])
    assert again.prompts[0].text == "Hi|<think>Because.</think>Yes.|Hi|<think>\n"


def test_lines_of_batch_jobs_may_ask_for_responses(model):
    line = {"custom_id": "a", "url": "/v1/responses", "body": {"input": "Hi"}}
    result = batch_request(line, 1, model, seed=0).result([output(model, TEXT)], 5)
    body = result.content["response"]["body"]
    assert body["output"][1]["content"][0]["text"] == "Yes."
    assert body["usage"]["input_tokens_details"] == {"cached_tokens": 0}
    totals = JobTotals.of([Result.parse(result.text)])
    assert [*totals.prompt_tokens, *totals.output_tokens] == [2, len(TEXT)]


def test_messages_have_it_as_a_block(model):
    call = parse(MessagesRequest, model, messages=MESSAGES, max_tokens=99, stream=True)
    body = call.response([output(model, TEXT)], "r", 5)
    thought, text = body["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "Because.")
    assert text == {"type": "text", "text": "Yes."} and body["stop_reason"] == "end_turn"
    kinds = [e.get("delta", {}).get("type") or e["type"] for e in streamed(call, TEXT)]
    assert kinds[:3] == ["message_start", "content_block_start", "thinking_delta"]
    between = kinds.index("signature_delta")
    assert kinds[between + 1 : between + 4] == [
        *("content_block_stop", "content_block_start", "text_delta")
    ]
    turns = [*MESSAGES, {"role": "assistant", "content": body["content"]}, *MESSAGES]
    again = parse(MessagesRequest, model, messages=turns, max_tokens=99)
    assert again.prompts[0].text == "Hi|<think>Because.</think>Yes.|Hi|<think>\n"


def test_a_client_turns_it_off(model):
    for call in (
        parse(
            MessagesRequest, model, messages=MESSAGES, max_tokens=9, thinking={"type": "disabled"}
        ),
        parse(
            ChatCompletionRequest,
            model,
            messages=MESSAGES,
            chat_template_kwargs={"enable_thinking": False},
        ),
    ):
        assert call.prompts[0].text == "Hi|"
    shown = parse(ChatCompletionRequest, model, messages=MESSAGES, include_reasoning=False)
    message = shown.response([output(model, TEXT)], "r", 5)["choices"][0]["message"]
    assert message["content"] == "Yes." and "reasoning_content" not in message


def test_responses_and_messages_leave_it_out_too(model):
    whole = [output(model, TEXT)]
    call = parse(ResponsesRequest, model, input="Hi", include_reasoning=False)
    body = call.response(whole, "r", 5)
    assert [item["type"] for item in body["output"]] == ["message"]
    assert body["output"][0]["content"][0]["text"] == "Yes."
    assert streamed(call, TEXT)[-1]["response"] == body
    fields = {"messages": MESSAGES, "max_tokens": 99, "include_reasoning": False}
    body = parse(MessagesRequest, model, **fields).response(whole, "r", 5)
    assert body["content"] == [{"type": "text", "text": "Yes."}]


def test_responses_repeat_the_request(model):
    fields = {"user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "max_tool_calls": 3}
    call = parse(ResponsesRequest, model, input="Hi", **fields)
    one = output(model, TEXT)
    one = dataclasses.replace(one, metrics=RequestMetrics(1_000_000, finish_us=3_500_000))
    body = call.response([one], "r", 5)
    assert {name: body[name] for name in fields} == fields
    assert body["service_tier"] is None and body["completed_at"] == 7
    started = next(call.chunks("r", 5).begin())["response"]
    assert started["completed_at"] is None and set(started) == set(body)


def test_the_usage_of_a_message_adds_up_from_its_start_to_its_end(model):
    call = parse(MessagesRequest, model, messages=MESSAGES, max_tokens=99, stream=True)
    events = streamed(call, TEXT)
    start, end = events[0]["message"]["usage"], events[-2]["usage"]
    assert set(start) == set(end) and end["cache_read_input_tokens"] == 1
    assert start["input_tokens"] == len(call.prompts[0].token_ids)


@pytest.mark.parametrize("parser", ["none", "auto", "qwen3"])
def test_the_reasoning_parser_decides_what_is_reasoning(model, parser):
    plain = copy.copy(model.tokenizer)
    plain._chat_templates = {"default": "{{ messages[0].content }}"}
    chatty = dataclasses.replace(model, tokenizer=plain, chat=ChatSettings(parser))
    call = parse(ChatCompletionRequest, chatty, messages=MESSAGES)
    text = "<think>" + TEXT
    message = call.response([output(model, text)], "r", 5)["choices"][0]["message"]
    if parser == "qwen3":
        assert (message["reasoning_content"], message["content"]) == ("Because.", "Yes.")
    else:
        assert message["content"] == text and "reasoning_content" not in message


def test_structured_output_is_content(model):
    """It has its format from the first token on."""
    format_ = {"type": "json_object"}
    call = parse(ChatCompletionRequest, model, messages=MESSAGES, response_format=format_)
    message = call.response([output(model, "{}")], "r", 5)["choices"][0]["message"]
    assert message["content"] == "{}"
    assert message["reasoning"] is message["reasoning_content"] is None


def test_a_template_of_the_request_needs_trust(model):
    fields = {"messages": MESSAGES, "chat_template": "<{{ messages[0].content }}>"}
    for kind in (ChatCompletionRequest, TokenizeRequest):
        request = kind.model_validate(fields)
        with pytest.raises(RequestError, match="--trust-request-chat-template"):
            request.answer(model) if kind is TokenizeRequest else request.parse(model)
    with pytest.raises(RequestError, match="must not set 'chat_template'"):
        given = {"chat_template_kwargs": {"chat_template": "x"}}
        parse(ChatCompletionRequest, model, messages=MESSAGES, **given)
    trusting = dataclasses.replace(model, chat=ChatSettings(trust_request_chat_template=True))
    assert parse(ChatCompletionRequest, trusting, **fields).prompts[0].text == "<Hi>"
    assert TokenizeRequest.model_validate(fields).answer(trusting)["count"] == len("<Hi>")
    broken = fields | {"chat_template": "{% if %}"}
    for kind in (ChatCompletionRequest, TokenizeRequest):
        request = kind.model_validate(broken)
        with pytest.raises(FieldError, match=r"^chat_template is not valid Jinja") as refusal:
            request.answer(trusting) if kind is TokenizeRequest else request.parse(trusting)
        assert refusal.value.field == "chat_template"
    own = copy.copy(model.tokenizer)
    own._chat_templates = {"default": "{% if %}"}
    model = dataclasses.replace(model, tokenizer=own)
    with pytest.raises(ChatTemplateError, match="the chat template is not valid Jinja, line 1"):
        parse(ChatCompletionRequest, model, messages=MESSAGES)


def test_streams_that_fail_say_so_in_their_format(model):
    reply = ErrorReply(422, "no token", "invalid_request_error", None, "generation_failed")
    responses = parse(ResponsesRequest, model, input="Hi", stream=True).chunks("r", 5)
    (event,) = responses.failed(reply)
    assert event["type"] == "response.failed" and event["response"]["status"] == "failed"
    assert event["response"]["error"]["message"] == "no token"
    messages = parse(MessagesRequest, model, messages=MESSAGES, max_tokens=9, stream=True)
    (event,) = messages.chunks("r", 5).failed(reply)
    assert event["type"] == "error" and event["error"]["message"] == "no token"


def test_budgets_need_reasoning_that_tokens_can_end(model):
    fields = {"messages": MESSAGES, "thinking_token_budget": 7}
    assert parse(ChatCompletionRequest, model, **fields).params.thinking_token_budget == 7
    completion = parse(CompletionRequest, model, prompt="Hi", thinking_token_budget=7)
    assert completion.params.thinking_token_budget == 7
    for parser, reason in (("none", "--reasoning-parser"), ("openai_gptoss", "openai_gptoss")):
        chatty = dataclasses.replace(model, chat=ChatSettings(parser))
        for kind, body in (
            (ChatCompletionRequest, fields),
            (CompletionRequest, {"prompt": "Hi", "thinking_token_budget": 7}),
        ):
            with pytest.raises(RequestError, match=f"thinking_token_budget .*{reason}"):
                parse(kind, chatty, **body)
    with pytest.raises(RequestError, match="beam search"):
        parse(ChatCompletionRequest, model, **fields, use_beam_search=True)


def test_a_prompt_that_is_cut_before_its_end_opens_no_reasoning(model):
    whole = parse(ChatCompletionRequest, model, messages=MESSAGES)
    cut = {"messages": MESSAGES, "truncate_prompt_tokens": 2, "truncation_side": "right"}
    for call, reasoned in ((whole, True), (parse(ChatCompletionRequest, model, **cut), False)):
        message = call.response([output(model, "Yes.")], "r", 5)["choices"][0]["message"]
        assert message["content"] == ("" if reasoned else "Yes.")


def test_with_a_budget_the_format_comes_after_the_reasoning(model):
    fields = {"messages": MESSAGES, "response_format": {"type": "json_object"}}
    call = parse(ChatCompletionRequest, model, **fields, thinking_token_budget=-1)
    body = call.response([output(model, "Because.</think>{}")], "r", 5)
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Because.", "{}")


def test_messages_bring_their_budget(model):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    fields = {"messages": MESSAGES, "max_tokens": 2000, "thinking": thinking}
    assert parse(MessagesRequest, model, **fields).chat.params.thinking_token_budget == 1024
    silent = dataclasses.replace(model, chat=ChatSettings("none"))
    assert parse(MessagesRequest, silent, **fields).chat.params.thinking_token_budget is None
    thinking["budget_tokens"] = -5
    with pytest.raises(RequestError, match=r"^thinking\.budget_tokens must be an integer"):
        parse(MessagesRequest, model, **fields)
