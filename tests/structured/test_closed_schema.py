"""Which objects of a schema are closed to properties that it does not declare."""

from __future__ import annotations

import copy

import pytest

from jaxserve.structured.closed_schema import close_objects

SHUT = {"additionalProperties": False}
A, B = {"properties": {"a": {}}}, {"properties": {"b": {}}}
HAS_A = {"required": ["a"]}


@pytest.mark.parametrize(
    "schema, closed",
    [
        (A, A | SHUT),
        ({"properties": {}}, {"properties": {}} | SHUT),
        ({"patternProperties": {"^x": A}}, {"patternProperties": {"^x": A | SHUT}} | SHUT),
        ({"items": A}, {"items": A | SHUT}),
        ({"properties": {"inner": A}}, {"properties": {"inner": A | SHUT}} | SHUT),
        ({"anyOf": [A, B]}, {"anyOf": [A | SHUT, B | SHUT]}),
        (A | {"anyOf": [HAS_A, {}]}, A | {"anyOf": [HAS_A, {}]} | SHUT),
        (
            {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": A}},
            {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": A | SHUT}},
        ),
        (
            {"properties": {"next": {"$ref": "#"}}},
            {"properties": {"next": {"$ref": "#"}}} | SHUT,
        ),
    ],
)
def test_an_object_that_declares_its_properties_has_no_others(schema, closed):
    schema = copy.deepcopy(schema)
    close_objects(schema)
    assert schema == closed


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        A | {"additionalProperties": True},
        A | {"unevaluatedProperties": {"type": "string"}},
        A | {"required": ["b"]},
        {"const": A},
        {"not": A},
        # Declared by several schemas together.
        {"allOf": [A, B]},
        A | {"anyOf": [B, {}]},
        A | {"if": {"properties": {"a": {"const": 1}}}, "then": B},
        A | {"$ref": "#/$defs/y", "$defs": {"y": B}},
        {
            "allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}],
            "$defs": {"x": {"$ref": "#/$defs/odd~1name"}, "odd/name": A, "y": {"anyOf": [B]}},
        },
    ],
)
def test_what_says_otherwise_or_is_declared_elsewhere_stays_open(schema):
    given = copy.deepcopy(schema)
    close_objects(given)
    assert given == schema


def test_what_is_no_schema_is_left_to_the_compiler():
    for odd in ({"properties": 1}, {"allOf": {"a": 1}}, {"$ref": 3}, {"required": 1, **A}):
        close_objects(dict(odd))


def test_size_and_depth_are_no_trouble():
    chain = {f"a{i}": {"$ref": f"#/a{i + 1}"} | A for i in range(1_500)}
    close_objects({"$ref": "#/a0"} | chain | A)
    deep = A
    for _ in range(5_000):
        deep = {"anyOf": [deep]}
    close_objects(deep)
