"""What clients written for other servers send, and what they are answered."""

from __future__ import annotations

import json
import shutil

import pytest
from server_process import ServerProcess

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
    assert "id=body-1 POST" in server.text()
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
