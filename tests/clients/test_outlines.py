"""Outlines, as a client of OpenAI's interface and of vLLM's."""

from __future__ import annotations

from typing import Literal

import pytest
from client_inputs import ASK, MODEL, Person

pytestmark = pytest.mark.clients
outlines = pytest.importorskip("outlines")
CLIENT = "outlines"


@pytest.fixture
def client(url):
    import openai

    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_from_openai(client):
    """`from_openai`: objects of a schema"""
    text = outlines.from_openai(client, MODEL)(ASK, Person, max_tokens=120)
    Person.model_validate_json(text)


def test_from_vllm(client):
    """`from_vllm`: objects, choices and regular expressions"""
    model = outlines.from_vllm(client, MODEL)
    Person.model_validate_json(model(ASK, Person, max_tokens=120))
    assert model("Tea or coffee?", Literal["tea", "coffee"], max_tokens=8) in ("tea", "coffee")
    number = model("A year?", outlines.types.Regex("[0-9]{4}"), max_tokens=8)
    assert len(number) == 4 and number.isdigit()
