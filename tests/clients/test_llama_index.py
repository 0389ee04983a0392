"""LlamaIndex's model for servers like OpenAI's."""

from __future__ import annotations

import pytest
from client_inputs import ASK, MODEL, WEATHER, Person, calls, get_weather

pytestmark = pytest.mark.clients
openai_like = pytest.importorskip("llama_index.llms.openai_like")
CLIENT = "llama-index-llms-openai-like"


@pytest.fixture
def model(url):
    return openai_like.OpenAILike(
        model=MODEL,
        api_base=url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        should_use_structured_outputs=True,
        context_window=2048,
        temperature=0,
        max_tokens=60,
        max_retries=0,
    )


def test_tools(model):
    """`predict_and_call` with a required tool"""
    from llama_index.core.tools import FunctionTool

    calls.clear()
    tool = FunctionTool.from_defaults(get_weather)
    answer = model.predict_and_call([tool], user_msg=WEATHER, tool_required=True)
    assert len(calls) == 1 and answer.response == f"It is sunny in {calls[0]}."


def test_structured(model):
    """`as_structured_llm`"""
    assert isinstance(model.as_structured_llm(Person).complete(ASK).raw, Person)


def test_chat(model):
    """chats and completions, streamed or not"""
    from llama_index.core.llms import ChatMessage

    messages = [ChatMessage(role="user", content="Say hello.")]
    whole = model.chat(messages, max_tokens=8).message.content
    *_, last = model.stream_chat(messages, max_tokens=8)
    assert last.message.content == whole and whole
    assert model.complete("1 2 3", max_tokens=4).text
