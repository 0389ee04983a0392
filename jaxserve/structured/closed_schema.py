"""JSON schemas whose objects have only the properties that they declare.

By the standard, a schema without `additionalProperties` allows any property. Few authors mean that,
and a model that may always add another property does so until `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

_REFERENCES = ("$ref", "$dynamicRef")
_PROPERTIES = ("properties", "patternProperties", "additionalProperties", "unevaluatedProperties")
_MAPS = ("dependentSchemas", "properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value maps names to schemas. Of the others it is a schema, or a list of them."""

_ALL_HOLD = ("allOf", "if", "then", "else", "dependentSchemas")
_ONE_HOLDS = ("anyOf", "oneOf")
_OF_PARTS = ("items", "prefixItems", "contains", "additionalProperties", *_MAPS[1:])


def close_objects(root: Schema) -> None:
    """Set `additionalProperties` to false in each object that declares its properties and says
    nothing about others.

    Objects that several schemas declare together stay open, since each schema would exclude the
    properties of the others: `properties` beside a `$ref`, for example, or in two schemas of an
    `allOf`. So does an object that requires a property without declaring it.
    """
    schemas = list(_all_schemas(root))
    left = [schema for schema in schemas if _num_declaring(schema) > 1]
    together: set[int] = set()
    while left:
        schema = left.pop()
        if id(schema) not in together:
            together.add(id(schema))
            left += _of_same_object(schema, root)
    for schema in schemas:
        if id(schema) not in together and _declares_its_properties(schema):
            schema["additionalProperties"] = False


def _declares_its_properties(schema: Schema) -> bool:
    declared, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(declared, dict) or not isinstance(required, list):
        return False  # Not a schema, as its compiler will say.
    return (
        ("properties" in schema or "patternProperties" in schema)
        and "additionalProperties" not in schema
        and "unevaluatedProperties" not in schema
        and all(name in declared for name in required if isinstance(name, str))
    )


def _num_declaring(schema: Schema) -> int:
    """How many schemas declare properties of the object of `schema`, itself included."""
    return (
        any(keyword in schema for keyword in _PROPERTIES)
        + sum(keyword in schema for keyword in _REFERENCES)
        + sum(any(map(_declares, _below(schema, keyword))) for keyword in _ONE_HOLDS)
        + sum(_declares(part) for keyword in _ALL_HOLD for part in _below(schema, keyword))
    )


def _declares(schema: Schema) -> bool:
    """Whether a schema may declare properties; a nested combination may."""
    return any(
        keyword in schema for keyword in (*_PROPERTIES, *_REFERENCES, *_ALL_HOLD, *_ONE_HOLDS)
    )


def _of_same_object(schema: Schema, root: Schema) -> Iterator[Schema]:
    """Schemas that hold of the same object as `schema`."""
    for keyword in (*_ALL_HOLD, *_ONE_HOLDS):
        yield from _below(schema, keyword)
    for keyword in _REFERENCES:
        target = _target(schema.get(keyword), root)
        if target is not None:
            yield target


def _all_schemas(root: Schema) -> Iterator[Schema]:
    """A schema and all schemas in it, but for those below `not`."""
    left = [root]
    while left:
        schema = left.pop()
        yield schema
        for keyword in (*_ALL_HOLD, *_ONE_HOLDS, *_OF_PARTS):
            left += _below(schema, keyword)


def _below(schema: Schema, keyword: str) -> Iterator[Schema]:
    value = schema.get(keyword)
    if keyword in _MAPS:
        value = list(value.values()) if isinstance(value, dict) else []
    values = value if isinstance(value, list) else [value]
    return (each for each in values if isinstance(each, dict))


def _target(reference: Any, root: Schema) -> Schema | None:
    """What a reference within the document names; None for any other."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for name in unquote(reference[1:]).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return None
    return found if isinstance(found, dict) else None
