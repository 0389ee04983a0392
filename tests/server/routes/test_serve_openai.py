"""OpenAI's own client against a server, and what it is told against `LLM`."""

from __future__ import annotations

import json

import jsonschema
import pytest
from pydantic import BaseModel
from server_process import prompt_of

from jaxserve import LLM, SamplingParams

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.interfaces

MESSAGES = [{"role": "user", "content": "Hi!"}]
GREEDY = {"model": "tiny", "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def llm(chat_model):
    with LLM(chat_model, max_num_seqs=4, max_num_batched_tokens=36, page_size=16) as llm:
        yield llm


def test_completions_are_those_of_llm(client, llm):
    prompts = [prompt_of(length, seed=length) for length in (1, 5, 16, 40, 100)]
    wanted = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    answer = client.completions.create(prompt=prompts, max_tokens=24, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4]
    assert [choice.text for choice in answer.choices] == [o.outputs[0].text for o in wanted]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage.prompt_tokens == 162 and answer.usage.completion_tokens == 5 * 24


def test_seeded_samples_are_those_of_llm_streamed_or_not(client, llm):
    params = SamplingParams(n=3, seed=5, max_tokens=16, temperature=0.9, top_k=20)
    (wanted,) = llm.generate("hello", params)
    fields = {"prompt": "hello", "n": 3, "seed": 5, "max_tokens": 16, "temperature": 0.9}
    fields |= {"model": "tiny", "extra_body": {"top_k": 20, "return_token_ids": True}}
    whole = client.completions.create(**fields)
    texts, token_ids = ["", "", ""], [[], [], []]
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            token_ids[choice.index] += choice.token_ids
    assert texts == [choice.text for choice in whole.choices] == [o.text for o in wanted.outputs]
    assert token_ids == [list(o.token_ids) for o in wanted.outputs]
    assert whole.choices[1].token_ids == token_ids[1]


def test_embeddings_are_those_of_llm(client, llm):
    """The client asks for base64 unless it is told otherwise."""
    texts = ["a cat", "dogs", "the sea"]
    wanted = [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]
    for options in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model="tiny", input=texts, **options)
        for entry, expected in zip(answer.data, wanted, strict=True):
            assert entry.embedding == pytest.approx(expected, abs=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == len("".join(texts))


def test_chat_is_that_of_llm_streamed_or_not(client, llm):
    (wanted,) = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    fields = {"messages": MESSAGES, "max_completion_tokens": 100, **GREEDY}
    whole = client.chat.completions.create(**fields)
    message = whole.choices[0].message
    assert (message.role, message.content) == ("assistant", wanted.outputs[0].text)
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options=options))
    *told, counted = chunks
    assert told[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in told]
    assert "".join(pieces) == message.content and len(pieces) > 1
    assert [c.choices[0].finish_reason for c in told if c.choices[0].finish_reason] == ["length"]
    assert counted.choices == [] and counted.usage.completion_tokens == 100
    assert counted.usage.prompt_tokens == whole.usage.prompt_tokens
    assert {chunk.usage for chunk in told} == {None}


def test_a_message_that_was_answered_is_sent_back(client):
    first = client.chat.completions.create(messages=MESSAGES, max_tokens=4, **GREEDY)
    messages = [*MESSAGES, first.choices[0].message, {"role": "user", "content": "And?"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi!"}]}, *messages[1:]]
    responses = [
        client.chat.completions.create(messages=given, max_tokens=4, **GREEDY)
        for given in (messages, parts, [m if type(m) is dict else m.model_dump() for m in messages])
    ]
    assert len({answer.choices[0].message.content for answer in responses}) == 1


def test_logprobs_are_those_of_llm(client, llm):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    (wanted,) = llm.generate("hello", params)
    expected = [
        entry[token]
        for entry, token in zip(wanted.outputs[0].logprobs, wanted.outputs[0].token_ids)
    ]
    fields = {"prompt": "hello", "max_tokens": 6, "logprobs": 3, **GREEDY}
    whole = client.completions.create(**fields).choices[0].logprobs
    assert whole.token_logprobs == pytest.approx([e.logprob for e in expected], abs=1e-5)
    assert whole.tokens == [e.decoded_token for e in expected]
    assert whole.text_offset == [0, 1, 2, 3, 4, 5]
    assert all(1 <= len(top) <= 4 for top in whole.top_logprobs)
    streamed: dict[str, list] = {"tokens": [], "token_logprobs": [], "text_offset": []}
    for chunk in client.completions.create(**fields, stream=True):
        for name, values in streamed.items():
            if chunk.choices[0].logprobs:
                values += getattr(chunk.choices[0].logprobs, name)
    for name, values in streamed.items():
        assert values == getattr(whole, name)
    chat = client.chat.completions.create(
        messages=MESSAGES, max_tokens=3, logprobs=True, top_logprobs=2, **GREEDY
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 3
    for token in content:
        assert len(token.top_logprobs) == 2
        assert token.logprob == token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
        assert bytes(token.bytes).decode("utf-8", "replace") == token.token


def test_echo_scores_a_prompt(client, llm):
    prompt = prompt_of(12, seed=3)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (wanted,) = llm.generate(prompt, params)
    expected = [e[token].logprob for e, token in zip(wanted.prompt_logprobs[1:], prompt[1:])]
    fields = {"prompt": prompt, "echo": True, "logprobs": 1, "temperature": 0, "model": "tiny"}
    scored = client.completions.create(**fields, max_tokens=0)
    first, *scores = scored.choices[0].logprobs.token_logprobs
    assert first is None and scores == pytest.approx(expected, abs=1e-5)
    assert scored.choices[0].text == llm.get_tokenizer().decode(prompt)
    assert scored.usage.completion_tokens == 0
    one_more = client.completions.create(**fields, max_tokens=1).choices[0]
    assert len(one_more.logprobs.tokens) == 13
    assert one_more.text == scored.choices[0].text + wanted.outputs[0].text
    assert one_more.logprobs.token_logprobs[1:-1] == pytest.approx(expected, abs=1e-5)
    text = client.completions.create(prompt="hello", echo=True, max_tokens=2, **GREEDY)
    assert text.choices[0].text.startswith("hello")


def test_stops_and_their_reasons(client):
    fields = {"prompt": prompt_of(9), "max_tokens": 40, **GREEDY}
    whole = client.completions.create(**fields).choices[0].text
    stop = whole[10:12]
    cut = client.completions.create(**fields, stop=[stop, "never there"]).choices[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (
        whole[: whole.index(stop)],
        "stop",
        stop,
    )
    streamed = client.completions.create(**fields, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut.text


def test_what_was_not_asked_for_is_null(server):
    """As in vLLM, whose clients read these fields of every answer."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    completion = server.complete({"prompt": "hi", "max_tokens": 2})["choices"][0]
    answer = server.post("/v1/chat/completions", chat).json()
    for name in ("prompt_logprobs", "prompt_token_ids"):
        assert completion[name] is None and answer[name] is None
    assert completion["token_ids"] is None and answer["choices"][0]["token_ids"] is None
    asked = server.post("/v1/chat/completions", chat | {"return_token_ids": True}).json()
    assert asked["prompt_token_ids"] and asked["choices"][0]["token_ids"]


@pytest.mark.parametrize(
    ("route", "other", "body"),
    [
        ("chat/completions", "/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("chat/completions", "/invocations", {"messages": [{"role": "user", "content": "a"}]}),
        ("completions", "/invocations", {"prompt": "a"}),
        ("embeddings", "/invocations", {"input": "a"}),
    ],
)
def test_routes_by_the_names_of_others_answer_the_same(server, route, other, body):
    sampled = {} if "input" in body else {"temperature": 0, "max_tokens": 4}
    answers = [server.post(path, body | sampled) for path in (f"/v1/{route}", other)]
    assert [answer.status_code for answer in answers] == [200, 200]
    first, second = (answer.json() for answer in answers)
    assert first.keys() == second.keys()
    told = "data" if "input" in body else "choices"
    assert first[told] == second[told]


def test_bad_invocations_name_the_field(server):
    for body, said in (
        ({}, "messages, prompt, input"),
        ({"prompt": "a", "nonsense": 1}, "nonsense is not a field"),
        ({"messages": [], "max_tokens": "x"}, "max_tokens must be"),
        ([1], "body must be"),
    ):
        refused = server.post("/invocations", body)
        assert refused.status_code == 400, refused.text
        assert said in refused.json()["error"]["message"]
    assert server.client.get("/models").json() == server.client.get("/v1/models").json()


def test_prompt_logprobs_in_vllms_shape(server):
    body = {"prompt": [5, 6, 7], "max_tokens": 1, "prompt_logprobs": 1, "temperature": 0}
    first, second, _ = server.complete(body)["choices"][0]["prompt_logprobs"]
    assert first is None and second["6"]["rank"] >= 1 and second["6"]["logprob"] < 0


def test_tokenizer_routes(server, llm):
    tokenizer = llm.get_tokenizer()
    answer = server.post("/tokenize", {"prompt": "hello", "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode("hello") and answer["count"] == 5
    assert answer["token_strs"] == list("hello") and answer["max_model_len"] == 2048
    back = server.post("/detokenize", {"tokens": answer["tokens"]}).json()
    assert back == {"prompt": "hello"}
    chat = server.post("/tokenize", {"messages": MESSAGES}).json()
    assert chat["tokens"] == llm.chat_prompt(MESSAGES)
    info = server.client.get("/tokenizer_info").json()
    assert info["chat_template"] == tokenizer.chat_template
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    spelled = server.post("/tokenize", {"prompt": "a b", "return_token_strs": True}).json()
    assert spelled["token_strs"] == ["a", "Ġ", "b"]


def test_models_by_name(client):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == ("tiny", 2048)
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="model 'other' is not served"):
        client.completions.create(model="other", prompt="hi")


SCHEMA = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}, "colour": {"enum": ["red", "green"]}},
    "required": ["yes", "colour"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "paint", "description": "Paints.", "parameters": SCHEMA},
    },
    {"type": "function", "function": {"name": "wait"}},
]


def test_response_format_is_kept_to(client):
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    answer = client.chat.completions.create(
        messages=MESSAGES, response_format=form, max_tokens=200, seed=1, model="tiny"
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


def test_parse_gives_a_pydantic_model(client):
    class Verdict(BaseModel):
        guilty: bool
        years: bool

    answer = client.chat.completions.parse(
        messages=MESSAGES, response_format=Verdict, max_tokens=200, seed=2, model="tiny"
    )
    assert isinstance(answer.choices[0].message.parsed, Verdict)


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_tool_is_called(client, stream):
    chosen = {"type": "function", "function": {"name": "paint"}}
    fields = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": chosen, "max_tokens": 200}
    answer = client.chat.completions.create(**fields, model="tiny", seed=3, stream=stream)
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        call, *more = [delta for each in choices for delta in each.delta.tool_calls or ()]
        for delta in more:
            assert (delta.index, delta.id, delta.function.name) == (0, None, None)
            call.function.arguments += delta.function.arguments
        choice = choices[-1]
    else:
        choice = answer.choices[0]
        (call,) = choice.message.tool_calls
        assert choice.message.content is None
    assert choice.finish_reason == "tool_calls" and call.function.name == "paint"
    assert json.loads(call.function.arguments)["colour"] in ("red", "green")
    back = {"role": "assistant", "tool_calls": [call.model_dump()]}
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    client.chat.completions.create(
        messages=[*MESSAGES, back, result], tools=TOOLS, max_tokens=2, model="tiny"
    )


def test_some_tool_must_be_called(client):
    tools = TOOLS[:1]
    answer = client.chat.completions.create(
        messages=MESSAGES,
        tools=tools,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
        seed=4,
        model="tiny",
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "paint"


def test_text_is_no_call(client):
    answer = client.chat.completions.create(messages=MESSAGES, tools=TOOLS, max_tokens=9, **GREEDY)
    message = answer.choices[0].message
    assert message.tool_calls is None and message.content
