"""LangChain's chat model for OpenAI's interface."""

from __future__ import annotations

import pytest
from client_inputs import ASK, MODEL, WEATHER, Person, get_weather

pytestmark = pytest.mark.clients
langchain_openai = pytest.importorskip("langchain_openai")
CLIENT = "langchain-openai"


@pytest.fixture
def model(url):
    return langchain_openai.ChatOpenAI(
        base_url=url, api_key="none", model=MODEL, temperature=0, max_tokens=60, max_retries=0
    )


def test_bind_tools(model):
    """`bind_tools`: a call, its result, an answer"""
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    weather = tool(get_weather)
    messages = [HumanMessage(WEATHER)]
    messages.append(model.bind_tools([weather], tool_choice="get_weather").invoke(messages))
    (call,) = messages[-1].tool_calls
    messages.append(weather.invoke(call))
    answer = model.bind_tools([weather]).invoke(messages)
    assert answer.content and not answer.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model, method):
    """`with_structured_output`, by a schema or a function"""
    assert isinstance(model.with_structured_output(Person, method=method).invoke(ASK), Person)


def test_stream(model):
    """streams"""
    pieces = [*model.stream("Say hello.", max_tokens=8)]
    assert len(pieces) > 1 and "".join(piece.content for piece in pieces)
