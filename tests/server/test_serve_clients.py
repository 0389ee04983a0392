"""What clients written for other servers send, and what they are answered."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from server_process import ServerProcess

from jaxserve.engine.beam_search import BeamSearchParams
from jaxserve.llm import LLM

pytestmark = pytest.mark.interfaces

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
CHATTING = MESSAGES | {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, PROMPT), (CHAT, CHATTING)])
def test_load_generators_count_tokens_while_they_stream(server, path, body):
    """GuideLLM's options, with those of OpenAI's client."""
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True}
    long = {"max_tokens": 100, "ignore_eos": True, "stream": True, "stream_options": options}
    chunks = server.events(path, body | long)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 100 and len(set(counts)) > 2
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1
    assert chunks[-1]["choices"] == [] and "prompt_tokens_details" in chunks[-1]["usage"]


def test_greedy_samples_are_equal(server):
    texts = [choice["text"] for choice in server.complete(PROMPT | {"n": 3})["choices"]]
    assert len(texts) == 3 and len(set(texts)) == 1


def test_a_request_may_name_itself(server):
    """In its body, as for vLLM; a header comes first."""
    body = PROMPT | {"request_id": "body-1"}
    answer = server.post(COMPLETIONS, body)
    assert answer.json()["id"] == "cmpl-body-1"
    assert answer.headers["x-request-id"] == "body-1"
    server.wait_logged("id=body-1 POST")
    assert (
        server.post(COMPLETIONS, body, **{"x-request-id": "head-1"}).json()["id"] == "cmpl-head-1"
    )


def test_an_answer_is_continued(server):
    """With the text that it continues, streamed or not."""
    begin = {"role": "assistant", "content": "Well, "}
    more = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    body = CHATTING | more | {"messages": [*MESSAGES["messages"], begin], "max_tokens": 5}
    answer = server.post(CHAT, body).json()["choices"][0]["message"]["content"]
    assert answer.startswith("Well, ") and len(answer) > len("Well, ")
    chunks = server.events(CHAT, body | {"stream": True})
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(pieces) == answer


def test_the_best_of_several_samples(server):
    """Those that the same request returns without best_of, by their mean log probability."""
    body = PROMPT | {"temperature": 1.5, "seed": 3, "max_tokens": 6}
    sampled = server.complete(body | {"n": 5, "logprobs": 0})
    means = {
        choice["text"]: sum(choice["logprobs"]["token_logprobs"]) / 6
        for choice in sampled["choices"]
    }
    best = server.complete(body | {"n": 2, "best_of": 5})
    assert [c["text"] for c in best["choices"]] == sorted(means, key=means.get, reverse=True)[:2]
    assert [c["index"] for c in best["choices"]] == [0, 1]
    assert best["choices"][0]["logprobs"] is None
    assert best["usage"] == sampled["usage"]


def test_beam_search(server, chat_model):
    """The sequences that LLM.beam_search finds, of several prompts at once, with log
    probabilities of as many tokens as the request asks for."""
    prompts = [[5, 6, 7], [8, 9]]
    fields = {"n": 3, "max_tokens": 6, "use_beam_search": True, "length_penalty": 0.5}
    body = {"prompt": prompts, "logprobs": 1, "return_token_ids": True}
    choices = server.complete(body | fields)["choices"]
    with LLM(chat_model, max_num_seqs=4, max_num_batched_tokens=64) as llm:
        expected = llm.beam_search(prompts, BeamSearchParams(3, 6, length_penalty=0.5))
    found = [tuple(choice["token_ids"]) for choice in choices]
    assert found == [
        sequence.tokens[len(prompt) :]
        for prompt, output in zip(prompts, expected)
        for sequence in output.sequences
    ]
    for choice in choices:
        scores = choice["logprobs"]
        assert all(len(top) in (1, 2) for top in scores["top_logprobs"])
        assert len(scores["tokens"]) == len(choice["token_ids"])
    greedy = {"ignore_eos": True, "temperature": 0, "max_tokens": 5}
    bodies = (MESSAGES | greedy, MESSAGES | greedy | {"use_beam_search": True})
    sampled, searched = (server.post(CHAT, body).json()["choices"] for body in bodies)
    assert sampled[0]["message"] == searched[0]["message"]


def test_the_token_that_ends_an_answer_may_stay_in_its_text(server):
    token_ids = server.complete(PROMPT | {"return_token_ids": True})["choices"][0]["token_ids"]
    body = PROMPT | {"stop_token_ids": token_ids[2:3], "ignore_eos": False}
    (without,) = server.complete(body)["choices"]
    (with_it,) = server.complete(body | {"include_stop_str_in_output": True})["choices"]
    assert without["stop_reason"] == with_it["stop_reason"] == token_ids[2]
    last = server.post("/detokenize", {"tokens": token_ids[2:3]}).json()["prompt"]
    assert with_it["text"] == without["text"] + last and last


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
        ({"guided_choice": ["left", "right"], "guided_decoding_backend": "outlines"}, "left|right"),
        ({"guided_grammar": 'root ::= "x" | "yy"'}, "x|yy"),
        ({"guided_json": {"enum": ["u", "v"]}}, '"[uv]"'),
        ({"response_format": {"type": "json_object", "schema": {"enum": ["u"]}}}, '"u"'),
    ],
)
def test_constraints_by_names_of_other_servers(server, fields, pattern):
    (choice,) = server.complete(PROMPT | {"max_tokens": 20, "ignore_eos": False} | fields)[
        "choices"
    ]
    assert choice["finish_reason"] == "stop" and re.fullmatch(pattern, choice["text"])


@pytest.mark.parametrize("standard", [False, True])
def test_objects_have_only_declared_properties_unless_asked_for_others(server, standard):
    schema = {"properties": {"a": {"const": 1}}, "required": ["a"], "type": "object"}
    structured = {"json": schema | {"x-guidance": {"whitespace_flexible": False}}}
    if standard:
        structured["disable_additional_properties"] = False
    body = PROMPT | {
        "structured_outputs": structured,
        "max_tokens": 40,
        "ignore_eos": False,
        "n": 8,
    }
    texts = {c["text"] for c in server.complete(body | {"temperature": 1, "seed": 1})["choices"]}
    assert (texts == {'{"a":1}'}) == (not standard)


def test_null_fields_of_openais_bodies_are_there(server):
    chat = server.post(CHAT, CHATTING).json()
    assert chat["service_tier"] is None and chat["system_fingerprint"].startswith("fp_")
    (choice,) = chat["choices"]
    assert choice["logprobs"] is None
    message = choice["message"]
    assert message.keys() >= {"role", "content", "refusal", "annotations", "audio", "function_call"}
    assert {message[name] for name in ("refusal", "audio", "function_call")} == {None}
    completion = server.complete(PROMPT)
    assert completion["choices"][0]["logprobs"] is None
    first, *_ = server.events(CHAT, CHATTING | {"stream": True})
    prints = {body["system_fingerprint"] for body in (chat, completion, first)}
    assert prints == {chat["system_fingerprint"]}


TOOLS = [{"type": "function", "function": {"name": "wait"}}]


def test_a_forced_call_of_a_function_without_parameters_is_empty(server):
    body = MESSAGES | {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200, "seed": 1}
    body |= {"parallel_tool_calls": False}
    (call,) = server.post(CHAT, body).json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {}


def test_a_forced_call_that_was_cut_off_is_no_content(server):
    body = CHATTING | {"tools": TOOLS, "tool_choice": "required", "max_tokens": 3}
    choice = server.post(CHAT, body).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == "" and "tool_calls" not in choice["message"]


@pytest.fixture(scope="module")
def toolless_server(chat_model, tmp_path_factory):
    """A server of a model whose chat template has no tools."""
    directory = tmp_path_factory.mktemp("toolless")
    model = shutil.copytree(chat_model, directory / "m")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    server = ServerProcess(model, directory / "log")
    yield server.wait_ready()
    assert server.stop() == 0, server.text()


@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_the_template_lacks_are_left_out_with_a_warning(toolless_server, stream):
    """Agents offer tools to whatever model they are given."""
    body = CHATTING | {"tools": TOOLS, "stream": stream}
    answer = toolless_server.post(CHAT, body)
    assert answer.status_code == 200, answer.text
    assert "chat template has no tools" in answer.headers["warning"]
    assert "warning" not in toolless_server.post(CHAT, CHATTING).headers
    if not stream:
        assert answer.json()["choices"][0]["message"]["content"]
