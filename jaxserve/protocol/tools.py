"""Tools: functions that a model may call, as defined in a chat request."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import jsonschema
from jsonschema import Draft202012Validator
from pydantic import AfterValidator, ConfigDict, Field, StrictBool

from jaxserve.protocol.errors import FieldError
from jaxserve.protocol.field_types import JsonObject
from jaxserve.protocol.fields import Fields

MAX_TOOLS = 128
MAX_TOOLS_CHARS = 1 << 16
"""Characters of all names, descriptions and schemas of a request's tools."""

MAX_TOOLS_NODES = 4096
"""JSON values in all schemas of a request's tools. A check takes some 0.2 ms for each."""

CACHED_SCHEMAS = 256
"""Number of schemas whose check is remembered: agents send the same tools with every request."""

_NAME = r"[a-zA-Z0-9_-]{1,64}"


def _name(given: str) -> str:
    if not re.fullmatch(_NAME, given):
        raise ValueError("must be 1 to 64 of A-Z a-z 0-9 _ -")
    return given


Name = Annotated[str, AfterValidator(_name), Field(json_schema_extra={"pattern": f"^{_NAME}$"})]

_COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""llguidance's options of JSON in which a model cannot choose the whitespace."""

# A schema with one of these may declare properties.
_DECLARE_PROPERTIES = {
    *("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"),
    *("additionalProperties", "patternProperties", "unevaluatedProperties"),
}


class Function(Fields):
    """A function's name, description, and JSON schema of its arguments."""

    name: Name
    description: str | None = None
    parameters: JsonObject | None = None
    strict: StrictBool | None = None
    cache_control: Any = Field(None, exclude=True, description="Accepted and ignored.")

    def check(self, where: str) -> None:
        """Raises FieldError if `parameters` is not a JSON schema of an object."""
        try:
            fault = _fault_of_schema(json.dumps(self.schema_of_arguments))
        except RecursionError:
            fault = "is nested too deeply."
        if fault is not None:
            raise FieldError(f"{where}.parameters", fault)
        kind = self.schema_of_arguments.get("type", "object")
        if "object" not in (kind if isinstance(kind, list) else [kind]):
            raise FieldError(f"{where}.parameters.type", f"is {kind!r:.80}; it must be 'object'.")

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return {"type": "object"} if self.parameters is None else self.parameters

    @property
    def takes_nothing(self) -> bool:
        """Whether the only arguments are `{}`."""
        schema = self.schema_of_arguments
        if schema.get("properties") or schema.get("required"):
            return False
        others = _DECLARE_PROPERTIES & schema.keys() - {"additionalProperties"}
        return not others and schema.get("additionalProperties", False) is False

    @property
    def schema_of_forced_arguments(self) -> dict[str, Any]:
        """As `schema_of_arguments`; a schema that says nothing about properties declares none, so
        that a forced call of a function without parameters is `{}`."""
        schema = self.schema_of_arguments | {"type": "object"}
        if _DECLARE_PROPERTIES.isdisjoint(schema):
            schema.setdefault("properties", {})
        return schema


@functools.lru_cache(CACHED_SCHEMAS)
def _fault_of_schema(text: str) -> str | None:
    """Why a text is not a JSON schema; None if it is one."""
    try:
        Draft202012Validator.check_schema(json.loads(text))
    except jsonschema.SchemaError as error:
        return f"is not a JSON schema: {error.message:.200}."
    return None


class Tool(Fields):
    """A tool. Functions are the only kind; fields beside the function are ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    function: Function


def tool_of_type(known: str) -> Callable[[Any], Any]:
    """A validator that refuses tools of other types by that alone, whatever else they lack."""

    def check(given: Any) -> Any:
        kind = given.get("type", known) if isinstance(given, Mapping) else known
        if kind not in (known, None):
            raise ValueError(
                f"is of the type {kind!r:.80}, which this server does not have; use {known!r}"
            )
        return given

    return check


class ChosenName(Fields):
    name: str


class ChosenTool(Fields):
    """The function that must be called."""

    type: Literal["function"]
    function: ChosenName


class CalledFunction(Fields):
    """A called function, with its arguments as JSON text. Other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: str


class CalledTool(Fields):
    """A call that the assistant made in an earlier message. Other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """Parse the arguments, since chat templates serialize them themselves."""
        arguments: Any = self.function.arguments
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, dict):
            arguments = parsed
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


def check_tools(tools: Sequence[Tool], chosen: str | ChosenTool | None) -> None:
    """Raises FieldError for tools that are too large, an invalid tool, duplicate names, or a choice
    that is not a tool."""
    if len(tools) > MAX_TOOLS:
        raise FieldError("tools", f"has {len(tools)} entries; at most {MAX_TOOLS} are allowed.")
    _check_size(tools)
    names: set[str] = set()
    for place, tool in enumerate(tools):
        where = f"tools[{place}].function"
        tool.function.check(where)
        if tool.function.name in names:
            raise FieldError(f"{where}.name", f"is {tool.function.name!r}, which is a duplicate.")
        names.add(tool.function.name)
    if chosen not in (None, "none", "auto") and not tools:
        raise FieldError("tool_choice", "needs tools to choose from.")
    if isinstance(chosen, ChosenTool) and chosen.function.name not in names:
        raise FieldError("tool_choice", f"names {chosen.function.name!r:.80}, which is not a tool.")


def _check_size(tools: Sequence[Tool]) -> None:
    """Raises FieldError for tools that would take long to check, at a cost that does not grow with
    them."""
    functions = [tool.function for tool in tools]
    left: list[Any] = [part for each in functions for part in (each.description, each.parameters)]
    nodes = chars = 0
    while left and nodes + len(left) <= MAX_TOOLS_NODES and chars <= MAX_TOOLS_CHARS:
        part = left.pop()
        nodes += 1
        if isinstance(part, dict):
            chars += sum(map(len, part))
            left.extend(part.values())
        elif isinstance(part, list):
            left.extend(part)
        elif isinstance(part, str):
            chars += len(part)
    if left or chars > MAX_TOOLS_CHARS:
        raise FieldError(
            "tools",
            f"are too large: their descriptions and schemas may have {MAX_TOOLS_CHARS} characters "
            f"and {MAX_TOOLS_NODES} JSON values in all; send fewer tools, or shorter ones.",
        )


def forced_schema(tools: Sequence[Tool], chosen: str | ChosenTool, parallel: bool) -> dict:
    """JSON schema of a forced call: the arguments of the chosen function, or a list of calls of any
    function. Where a function takes nothing there is no whitespace that a model chooses, so that no
    tokens are spent on it within `{}`. Raises FieldError if the tools' $defs conflict."""
    if isinstance(chosen, ChosenTool):
        function = function_named(tools, chosen.function.name)
        compact = {"x-guidance": _COMPACT} if function.takes_nothing else {}
        return function.schema_of_forced_arguments | compact
    definitions: dict[str, Any] = {}
    calls = []
    for place, tool in enumerate(tools):
        schema = tool.function.schema_of_forced_arguments
        # References start at the root of the schema, so $defs must stay there.
        for name, definition in dict(schema.pop("$defs", {})).items():
            if definitions.setdefault(name, definition) != definition:
                raise FieldError(
                    f"tools[{place}].function.parameters", f"defines {name!r:.80} differently."
                )
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "arguments": schema},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    limit: Mapping[str, int] = {} if parallel else {"maxItems": 1}
    schema = {"type": "array", "minItems": 1, **limit, "items": {"anyOf": calls}}
    if definitions:
        schema["$defs"] = definitions
    if any(tool.function.takes_nothing for tool in tools):
        schema["x-guidance"] = _COMPACT
    return schema


def function_named(tools: Sequence[Tool], name: str) -> Function | None:
    return next((tool.function for tool in tools if tool.function.name == name), None)
