"""How --help describes options, and groups the engine's: a few that are common, and the rest."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Annotated, Any, get_type_hints

import tyro
from tyro.conf import arg
from tyro.constructors import StructConstructorSpec, StructFieldSpec, StructTypeInfo

from jaxserve.cli.arguments.values import CONSTRUCTORS
from jaxserve.core.settings.config import EngineConfig

_BASIC = (
    "model",
    "dtype",
    "quantization",
    "max_model_len",
    "max_num_seqs",
    "tensor_parallel_size",
    "memory_utilization",
    "kv_cache_memory_bytes",
    "seed",
)
_ADVANCED_PREFIX = "advanced engine"


@dataclasses.dataclass(frozen=True)
class _Advanced:
    """The settings of a kind of EngineConfig that are not in `_BASIC`; by name, once parsed."""

    kind: type[EngineConfig] = EngineConfig
    values: dict[str, Any] = dataclasses.field(default_factory=dict)


@CONSTRUCTORS.struct_rule
def _grouped(info: StructTypeInfo) -> StructConstructorSpec | None:
    """An EngineConfig as its basic settings and a group of its own for the others."""
    kind = info.type
    if isinstance(kind, type) and issubclass(kind, EngineConfig):
        default = info.default if isinstance(info.default, kind) else kind()
        advanced = StructFieldSpec(
            name="advanced",
            type=Annotated[_Advanced, arg(name=_ADVANCED_PREFIX, prefix_name=False)],
            default=_Advanced(kind, vars(default)),
            helptext="Settings with defaults that seldom need a change.",
        )

        def build(advanced: _Advanced, **basic: Any) -> EngineConfig:
            return kind(**basic, **advanced.values)

        build.__doc__ = kind.__doc__  # the heading of the group
        fields = _fields(kind, vars(default), basic=True)
        return StructConstructorSpec(build, (*fields, advanced))
    if kind is _Advanced:
        kind, values = info.default.kind, info.default.values
        return StructConstructorSpec(
            lambda **given: _Advanced(kind, given), _fields(kind, values, basic=False)
        )
    return None


def _fields(
    kind: type[EngineConfig], values: dict[str, Any], basic: bool
) -> tuple[StructFieldSpec, ...]:
    """A kind may have settings `without_flags`, which keep their defaults."""
    hidden = getattr(kind, "without_flags", ())
    return tuple(
        field
        for field in _described(kind, values)
        if (field.name in _BASIC) == basic and field.name not in hidden
    )


@CONSTRUCTORS.struct_rule
def _options(info: StructTypeInfo) -> StructConstructorSpec | None:
    """The options of a command, or of a part of it."""
    kind = info.type
    is_ours = dataclasses.is_dataclass(kind) and kind.__module__.startswith("jaxserve.")
    if not is_ours or issubclass(kind, EngineConfig | _Advanced):
        return None
    given = vars(info.default) if isinstance(info.default, kind) else {}
    return StructConstructorSpec(kind, tuple(_described(kind, given)))


def _described(kind: type, values: dict[str, Any]) -> Iterator[StructFieldSpec]:
    """A dataclass's fields, with the text and the default that --help has of each."""
    hints, descriptions = get_type_hints(kind, include_extras=True), _descriptions(kind)
    for field in dataclasses.fields(kind):
        default = values.get(field.name, field.default)
        if default is dataclasses.MISSING:
            makes_one = field.default_factory is not dataclasses.MISSING
            default = field.default_factory() if makes_one else tyro.MISSING
        hint, text = hints[field.name], descriptions.get(field.name)
        if default in (None, (), tyro.MISSING):  # Its text says what happens then.
            hint = Annotated[hint, arg(help_behavior_hint="")]
        yield StructFieldSpec(field.name, hint, default, text)


def _descriptions(kind: type) -> dict[str, str]:
    """What the docstrings of a dataclass and its bases say of each field, with the names of others
    as flags."""

    def in_flags(words: str, names: set[str]) -> str:
        return re.sub(
            r"`(\w+)`|\b(\w+_\w+)\b",
            lambda match: (
                f"--{name.replace('_', '-')}"
                if (name := match[1] or match[2]) in names
                else match[0]
            ),
            words,
        )

    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        kinds = [kind for kind in (base, EngineConfig) if dataclasses.is_dataclass(kind)]
        names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
        attributes = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        told = re.findall(r"^ {4}(\w+): (.*?)(?=^ {4}\w|\Z)", attributes, re.M | re.S)
        found |= {name: in_flags(" ".join(words.split()), names) for name, words in told}
    return found
