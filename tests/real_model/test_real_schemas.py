"""Schemas of many kinds on the real model: whatever it says validates."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from exhaustive import EXHAUSTIVE

from jaxserve.core.requests.sampling_params import SamplingParams

pytestmark = pytest.mark.real_model

NAME = {"type": "string", "maxLength": 12}
COUNT = {"type": "integer", "minimum": 0, "maximum": 999}


def an_object(**properties):
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def a_list(items, most=3, least=0):
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


SCHEMAS = [
    an_object(name=NAME, age=COUNT),
    an_object(city=NAME, country=NAME, population=COUNT),
    an_object(tags=a_list(NAME), done={"type": "boolean"}),
    an_object(point=a_list({"type": "integer", "minimum": -99, "maximum": 99}, 2, 2)),
    an_object(color={"enum": ["red", "green", "blue"]}, size={"const": "large"}),
    an_object(id={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    an_object(day={"type": "string", "format": "date"}),
    an_object(value={"anyOf": [COUNT, NAME, {"type": "null"}]}),
    an_object(person=an_object(name=NAME, address=an_object(street=NAME, number=COUNT))),
    an_object(items=a_list(an_object(sku=NAME, amount=COUNT), 2, 1)),
    {
        "type": "object",
        "properties": {"title": NAME, "year": COUNT, "note": NAME},
        "required": ["title"],
        "additionalProperties": False,
    },
    {
        "$defs": {"leaf": an_object(v=COUNT), "pair": a_list({"$ref": "#/$defs/leaf"}, 2, 2)},
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/leaf"}, "both": {"$ref": "#/$defs/pair"}},
        "required": ["left", "both"],
        "additionalProperties": False,
    },
    a_list(COUNT, 4, 2),
    a_list({"enum": [True, None, 1.5, "x", [1, 2], {"k": "v"}]}, 3, 1),
    {"type": "string", "maxLength": 30},
    {"type": "integer", "minimum": 10, "maximum": 20},
    {"type": "number", "multipleOf": 5, "minimum": 0, "maximum": 100},
    {"enum": ["yes", "no", "maybe"]},
    {"oneOf": [an_object(kind={"const": "a"}, a=NAME), an_object(kind={"const": "b"}, b=COUNT)]},
    {"allOf": [{"type": "object", "required": ["a"]}, an_object(a=COUNT, b=NAME)]},
]
GENERATIONS = 80 if EXHAUSTIVE else len(SCHEMAS)
LONGEST = 680
"""Tokens: more than any of these schemas can need, whitespace and all."""


def test_whatever_is_generated_validates(llm):
    """Greedy and sampled, several a request, schemas of all kinds beside each other."""
    wanted, params = [], []
    for number in range(GENERATIONS):
        schema = SCHEMAS[number % len(SCHEMAS)]
        form = {"json": schema if number % 2 else json.dumps(schema)}
        how = {"temperature": 0} if number % 4 == 0 else {"temperature": 0.9, "seed": number}
        params.append(SamplingParams(max_tokens=LONGEST, structured_outputs=form, **how))
        wanted.append(schema)
    prompts = [f"Example {number} in JSON:\n" for number in range(GENERATIONS)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * GENERATIONS
    by_length = [o for o in outputs if o.outputs[0].finish_reason == "length"]
    assert by_length == []
    for schema, output in zip(wanted, outputs):
        jsonschema.validate(json.loads(output.outputs[0].text), schema)
    assert len({output.outputs[0].text for output in outputs}) > GENERATIONS // 4


def test_other_forms_on_the_real_model(llm):
    forms = {
        r"\d{3}-\d{4}": {"regex": r"\d{3}-\d{4}"},
        "(Paris|London|Rome)": {"choice": ["Paris", "London", "Rome"]},
        r"\(+x\)+": {"grammar": 'start: e\ne: "(" e ")" | "(x)"'},
    }
    params = [
        SamplingParams(temperature=t, seed=7, n=n, max_tokens=200, structured_outputs=form)
        for form in forms.values()
        for t, n in ((0.0, 1), (0.7, 3))
    ]
    prompts = ["The capital of France is"] * len(params)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for index, output in enumerate(outputs):
        for completion in output.outputs:
            if completion.finish_reason == "stop":
                assert re.fullmatch([*forms][index // 2], completion.text)
    assert outputs[2].outputs[0].text == "Paris"
    finished = [c for o in outputs for c in o.outputs if c.finish_reason == "stop"]
    assert len(finished) >= 8
