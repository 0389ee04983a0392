"""Instructor: Pydantic models by each of its modes for OpenAI's interface."""

from __future__ import annotations

import pytest
from client_inputs import ASK, MODEL, Person

pytestmark = pytest.mark.clients
instructor = pytest.importorskip("instructor")
CLIENT = "instructor"


def person(url, mode, **fields):
    import openai

    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        return instructor.from_openai(client, mode=instructor.Mode[mode]).chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": ASK}],
            response_model=Person,
            max_retries=0,
            max_tokens=120,
            **fields,
        )


@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS", "TOOLS_STRICT"])
def test_modes(url, mode):
    """the modes JSON_SCHEMA, TOOLS and TOOLS_STRICT"""
    assert isinstance(person(url, mode), Person)


@pytest.mark.parametrize("mode", ["JSON", "MD_JSON"])
def test_modes_with_guidance(url, mode):
    """the modes JSON and MD_JSON, with the schema in `extra_body`"""
    schema = Person.model_json_schema()
    json_mode = {"response_format": {"type": "json_object", "schema": schema}}
    options = json_mode if mode == "JSON" else {"structured_outputs": {"json": schema}}
    assert isinstance(person(url, mode, extra_body=options), Person)


def test_partial(url):
    """partial objects from a stream"""
    import openai

    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        patched = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
        *_, last = patched.chat.completions.create_partial(
            model=MODEL,
            messages=[{"role": "user", "content": ASK}],
            response_model=Person,
            max_tokens=120,
        )
    Person.model_validate(last.model_dump())
