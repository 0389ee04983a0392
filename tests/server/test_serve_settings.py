"""A server with the settings of chats: reasoning, templates of requests, processors, origins."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from server_process import ServerProcess

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.interfaces

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<think>{% endif %}"
)
PROCESSOR = """
import jax.numpy as jnp

def only(logits, token_id):
    return jnp.where(jnp.arange(len(logits)) == token_id, 0.0, -jnp.inf)
"""
MESSAGES = [{"role": "user", "content": "Hi"}]
LONG = {"messages": MESSAGES, "model": "m", "max_tokens": 12}
EXTRA = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def thinking(chat_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("thinking")
    model = shutil.copytree(chat_model, directory / "m")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (directory / "my_processors.py").write_text(PROCESSOR)
    found = os.environ.get("PYTHONPATH", "")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{directory}{os.pathsep}{found}")
        server = ServerProcess(
            model,
            directory / "log",
            "--served-model-name=m",
            "--reasoning-parser=deepseek_r1",
            "--trust-request-chat-template",
            "--logits-processors=my_processors:only",
            "--allowed-origins=https://chat.example.com",
        )
    yield server.wait_ready()
    assert server.stop() == 0, server.text()


def test_clients_get_reasoning_in_their_formats(thinking):
    anthropic = pytest.importorskip("anthropic")
    url = f"http://127.0.0.1:{thinking.port}"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        chat = client.chat.completions.create(**LONG, extra_body=EXTRA)
        thought = chat.choices[0].message.model_extra["reasoning_content"]
        assert thought and chat.choices[0].message.content == ""
        assert chat.usage.completion_tokens_details.reasoning_tokens == 12
        chunks = client.chat.completions.create(**LONG, extra_body=EXTRA, stream=True)
        deltas = [chunk.choices[0].delta.model_extra or {} for chunk in chunks]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thought
        fields = {"input": MESSAGES, "model": "m", "max_output_tokens": 12, "extra_body": EXTRA}
        (item, *_) = client.responses.create(**fields).output
        assert (item.type, item.content[0].text) == ("reasoning", thought)
        events = client.responses.create(**fields, stream=True)
        deltas = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
        assert "".join(deltas) == thought
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as claude:
        (block,) = claude.messages.create(**LONG, extra_body=EXTRA).content
        assert (block.type, block.thinking) == ("thinking", thought)
        with claude.messages.stream(**LONG, extra_body=EXTRA) as stream:
            assert stream.get_final_message().content[0].thinking == thought


def test_a_request_brings_its_template(thinking):
    body = LONG | EXTRA | {"chat_template": "{{ messages[0].content }}{{ mood }}", "max_tokens": 1}
    body |= {"chat_template_kwargs": {"mood": "!"}, "return_token_ids": True}
    answer = thinking.post("/v1/chat/completions", body).json()
    shown = thinking.post("/detokenize", {"tokens": answer["prompt_token_ids"]}).json()
    assert shown["prompt"] == "Hi!"


def test_a_request_names_a_processor(thinking):
    body = {"prompt": [5, 6], "max_tokens": 4, "temperature": 1.5, "return_token_ids": True}
    plain, named = (
        thinking.complete(body | more)["choices"][0]["token_ids"]
        for more in ({}, {"vllm_xargs": {"only": 77}})
    )
    assert named == [77] * 4 != plain
    refused = thinking.post("/v1/completions", body | {"vllm_xargs": {"other": 1}})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "vllm_xargs"
    settings = thinking.client.get("/server_info").json()["settings"]
    assert settings["logits_processors"] == ["only"] and settings["max_num_seqs"] == 4


def test_the_prefix_cache_is_emptied(thinking):
    def cached() -> int:
        usage = thinking.complete({"prompt": list(range(3, 70)), "max_tokens": 1})["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    assert thinking.post("/reset_prefix_cache", None).status_code == 200
    assert cached() == 0


def test_answers_carry_the_origin(thinking):
    headers = {"origin": "https://chat.example.com"}
    answer = thinking.client.get("/v1/models", headers=headers)
    assert answer.headers["access-control-allow-origin"] == "https://chat.example.com"
    other = thinking.client.get("/v1/models", headers={"origin": "https://other.example.com"})
    assert "access-control-allow-origin" not in other.headers
