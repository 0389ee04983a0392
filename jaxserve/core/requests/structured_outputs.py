"""Structured output options of a request: names and meanings as in vLLM."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

from jaxserve.core.errors import RequestError

MAX_GRAMMAR_BYTES = 1 << 16
"""Maximum UTF-8 size of a schema, a regex, a grammar, or all choices together."""

MAX_CHOICES = 1024

_KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The required format of an output: exactly one field is set, of the first five.

    `json` is a JSON schema, as text or as a mapping, which is stored as text: properties are
    generated in its order. `regex` matches the whole output, in the syntax of Rust's `regex`.
    `choice` lists the possible outputs. `grammar` is in Lark syntax, as supported by llguidance,
    with the rule `start`; or in GBNF, as in llama.cpp, with the rule `root`. `json_object`
    requests any JSON object.

    An object of a schema has only the properties that it declares, unless the schema has
    `additionalProperties`, or `disable_additional_properties` is False: then, as by the JSON Schema
    standard, it may have any others.

    Raises RequestError for anything that is invalid for every model. Compile errors are raised when
    the request is added.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_additional_properties: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs has {' and '.join(given) or 'nothing'} set; "
                f"set exactly one of {', '.join(_KINDS)}."
            )
        if not isinstance(self.disable_additional_properties, bool | None):
            raise RequestError(
                "structured_outputs.disable_additional_properties must be True or False, got "
                f"{self.disable_additional_properties!r:.80}."
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.json_object not in (None, True):
            raise RequestError(
                f"structured_outputs.json_object must be True, got {self.json_object!r}; "
                f"omit structured_outputs to allow any text."
            )
        for name in ("json", "regex", "grammar"):
            if getattr(self, name) is not None:
                _check_texts(name, [getattr(self, name)])

    @classmethod
    def of(cls, given: StructuredOutputs | Mapping[str, Any]) -> StructuredOutputs:
        """Accepts an instance or a mapping. Raises RequestError for anything else."""
        if isinstance(given, StructuredOutputs):
            return given
        if not isinstance(given, Mapping):
            raise RequestError(
                f"structured_outputs must be StructuredOutputs or a mapping, got {given!r:.80}."
            )
        known = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                raise RequestError(
                    f"structured_outputs has no field {name!r:.80}; set one of {', '.join(known)}."
                )
        return cls(**given)

    @property
    def kind(self) -> str:
        """Name of the field that sets the format."""
        return next(name for name in _KINDS if getattr(self, name) is not None)

    def to_json(self) -> dict[str, Any]:
        """The fields that are set, as a mapping for `of`."""
        return {name: value for name, value in vars(self).items() if value is not None}


def _schema_text(schema: Any) -> str:
    """A schema as JSON text."""
    try:
        if isinstance(schema, str):
            parsed = json.loads(schema)
        else:
            parsed, schema = schema, json.dumps(schema, allow_nan=False, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"structured_outputs.json is not valid JSON: {error}.") from error
    if not isinstance(parsed, Mapping):
        raise RequestError(
            f"structured_outputs.json must be a JSON schema, an object, got {parsed!r:.80}."
        )
    return schema


def _choices(choices: Any) -> tuple[str, ...]:
    if isinstance(choices, str | bytes | Mapping) or not isinstance(choices, Collection):
        raise RequestError(f"structured_outputs.choice must be a list, got {choices!r:.80}.")
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise RequestError(
            f"structured_outputs.choice has {len(choices)} entries; it must have 1..{MAX_CHOICES}."
        )
    _check_texts("choice", choices)
    return tuple(choices)


def _check_texts(name: str, texts: Collection[Any]) -> None:
    """Raises RequestError unless all are non-empty texts, and not too long."""
    num_bytes = 0
    for text in texts:
        if not isinstance(text, str) or not text:
            raise RequestError(
                f"structured_outputs.{name} must be non-empty text, got {text!r:.80}."
            )
        try:
            num_bytes += len(text.encode())
        except UnicodeEncodeError as error:
            raise RequestError(
                f"structured_outputs.{name} must be valid Unicode, got {text!r:.80}."
            ) from error
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise RequestError(
            f"structured_outputs.{name} has {num_bytes} bytes; "
            f"at most {MAX_GRAMMAR_BYTES} are allowed."
        )
