"""OpenAI's agents, with their models for chat completions and for responses."""

from __future__ import annotations

import asyncio

import pytest
from client_inputs import ASK, MODEL, WEATHER, Person, calls, get_weather

pytestmark = pytest.mark.clients
agents = pytest.importorskip("agents")
agents.set_tracing_disabled(True)
CLIENT = "openai-agents"


def run(url, task, model_class="OpenAIChatCompletionsModel", **settings):
    """An agent's final output."""
    import openai

    async def run():
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            model = getattr(agents, model_class)(MODEL, client)
            agent = agents.Agent("agent", model=model, **settings)
            return (await agents.Runner.run(agent, task, max_turns=4)).final_output

    return asyncio.run(run())


@pytest.mark.parametrize("model", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_tool_loop(url, model):
    """a tool loop by chats and by responses: a required call, its result, an answer"""
    calls.clear()
    answer = run(
        url,
        WEATHER,
        model,
        tools=[agents.function_tool(get_weather)],
        model_settings=agents.ModelSettings(tool_choice="required", max_tokens=60, temperature=0),
    )
    assert calls and isinstance(answer, str) and answer


def test_optional_tools(url):
    """tools that the model's chat template does not support are left out"""
    answer = run(
        url,
        WEATHER,
        tools=[agents.function_tool(get_weather)],
        model_settings=agents.ModelSettings(max_tokens=8),
    )
    assert isinstance(answer, str) and answer


def test_output_type(url):
    """an `output_type`"""
    settings = agents.ModelSettings(max_tokens=120)
    assert isinstance(run(url, ASK, output_type=Person, model_settings=settings), Person)
