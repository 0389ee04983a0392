"""Pydantic AI, with its model for chat completions."""

from __future__ import annotations

import pytest
from client_inputs import ASK, MODEL, WEATHER, Person, get_weather

pytestmark = pytest.mark.clients
pydantic_ai = pytest.importorskip("pydantic_ai")
CLIENT = "pydantic-ai-slim"


@pytest.fixture
def model(url):
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=url, api_key="none"))


def test_output_by_tool(model):
    """an output type by a required tool"""
    agent = pydantic_ai.Agent(model, output_type=Person, model_settings={"max_tokens": 120})
    assert isinstance(agent.run_sync(ASK).output, Person)


def test_native_output(model):
    """an output type by a JSON schema"""
    wanted = pydantic_ai.NativeOutput(Person)
    agent = pydantic_ai.Agent(model, output_type=wanted, model_settings={"max_tokens": 120})
    assert isinstance(agent.run_sync(ASK).output, Person)


def test_tools(model):
    """tools beside a text output"""
    agent = pydantic_ai.Agent(model, tools=[get_weather], model_settings={"max_tokens": 8})
    assert agent.run_sync(WEATHER).output
