"""How arguments of the command line become values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from tyro.conf import arg
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from jaxserve.core.dtypes import DTYPES
from jaxserve.core.settings.speculative import SpeculativeConfig

Value = TypeVar("Value")
CONSTRUCTORS = ConstructorRegistry()


def _one(metavar: str, parse: Callable[[str], Value]) -> PrimitiveConstructorSpec[Value]:
    """One argument, which `parse` understands. It raises ValueError for what it does not."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


def _one_or_none(
    metavar: str, parse: Callable[[str], Value]
) -> PrimitiveConstructorSpec[Value | None]:
    """One argument, which `parse` understands, or the word None."""
    return _one(metavar, lambda word: None if word.lower() == "none" else parse(word))


def _number(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{word!r} is not an integer.") from None


def _real_number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a number.") from None


def _size(word: str) -> int:
    if word.isdigit():
        return int(word)
    from pydantic import ByteSize, TypeAdapter, ValidationError

    try:
        return int(TypeAdapter(ByteSize).validate_python(word))
    except ValidationError:
        raise ValueError(
            f"{word!r} is not a size; give bytes, or a number and a unit, such as 512MiB or 2GiB."
        ) from None


Size = Annotated[int, _one("SIZE", _size)]
"""Bytes, with or without a unit: 2147483648, 2GiB, 2.5GB."""
OptionalSize = Annotated[int | None, _one_or_none("SIZE", _size)]
OptionalDtype = Annotated[str | None, _one_or_none(f"{{{','.join(DTYPES)}}}", str)]
"""Its other names, such as bf16, are left to EngineConfig."""


def _texts(words: list[str]) -> tuple[str, ...]:
    if not words:  # As of a variable of the shell that is not set.
        raise ValueError("it has no value; give one or more, or leave it out.")
    return tuple(words)


Texts = Annotated[
    tuple[str, ...],
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="TEXT [TEXT ...]",
        instance_from_str=_texts,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=list,
    ),
    arg(help_behavior_hint=lambda default: f"(default: {default})" if default else ""),
]
"""One or more arguments; --help names no default where that is none."""

Names = Annotated[
    tuple[str, ...],
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAME,NAME,...",
        instance_from_str=lambda words: tuple(name.strip() for name in words[0].split(",")),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda names: [",".join(names)],
    ),
]
"""Names as one comma-separated argument."""

OptionalSpeculation = Annotated[Any, _one_or_none("JSON", SpeculativeConfig.of)]
"""A SpeculativeConfig as one argument, and no flags of its fields."""


@CONSTRUCTORS.primitive_rule
def _numbers(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Parses integers as one comma-separated argument. As several arguments they would be ambiguous
    with the positional arguments that follow."""
    if info.type != tuple[int, ...] and set(get_args(info.type)) != {tuple[int, ...], NoneType}:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT,INT,...",
        instance_from_str=lambda words: _integers(words[0]),
        is_instance=lambda value: value is None or isinstance(value, tuple),
        str_from_instance=lambda numbers: [_joined(numbers)],
    )


def _integers(word: str) -> tuple[int, ...] | None:
    """None for the word None."""
    if word.lower() == "none":
        return None
    try:
        return tuple(map(int, word.split(",")))
    except ValueError:
        raise ValueError(f"{word!r} is not a list of integers, such as 0,1.") from None


Floats = Annotated[
    tuple[float, ...],
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="FLOAT,FLOAT,...",
        instance_from_str=lambda words: tuple(map(_real_number, words[0].split(","))),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda numbers: [",".join(map(str, numbers))],
    ),
]
"""Numbers as one comma-separated argument."""


def _joined(numbers: tuple[int, ...] | None) -> str:
    return "None" if numbers is None else ",".join(map(str, numbers))


_NUMBERS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    int: ("INT", _number),
    float: ("FLOAT", _real_number),
}
_TEXTS: dict[Any, tuple[str, Callable[[str], Any]]] = {str: ("STR", str), Path: ("PATH", Path)}


@CONSTRUCTORS.primitive_rule
def _number_of(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    return _one(*_NUMBERS[info.type]) if info.type in (int, float) else None


@CONSTRUCTORS.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Optional values as one type, so that --help and errors are about the value, not None."""
    kinds = set(get_args(info.type))
    if len(kinds) != 2 or NoneType not in kinds:
        return None
    (kind,) = kinds - {NoneType}
    if kind in _NUMBERS:
        return _one_or_none(*_NUMBERS[kind])
    if kind in _TEXTS:
        metavar, parse = _TEXTS[kind]
        return _one(metavar, lambda word: None if word == "None" else parse(word))
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        spec = _one_or_none(f"{{{','.join(choices)}}}", str)
        return dataclasses.replace(spec, choices=(*choices, "None"))
    return None
