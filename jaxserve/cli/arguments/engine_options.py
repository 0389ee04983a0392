"""How --help groups the engine's settings: a few that are common, and the rest."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Annotated, Any, get_type_hints

from tyro.conf import arg
from tyro.constructors import StructConstructorSpec, StructFieldSpec, StructTypeInfo

from jaxserve.cli.arguments.values import CONSTRUCTORS
from jaxserve.core.config import EngineConfig

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
    hints, descriptions = get_type_hints(kind, include_extras=True), _descriptions()
    hidden = getattr(kind, "without_flags", ())
    return tuple(
        StructFieldSpec(
            field.name, hints[field.name], values[field.name], descriptions.get(field.name)
        )
        for field in dataclasses.fields(kind)
        if (field.name in _BASIC) == basic and field.name not in hidden
    )


def _descriptions() -> dict[str, str]:
    """What EngineConfig's docstring says of each setting, with the names of others as flags."""
    text = inspect.getdoc(EngineConfig) or ""
    attributes = text.partition("Attributes:\n")[2]
    found = re.findall(r"^ {4}(\w+): (.*?)(?=^ {4}\w|\Z)", attributes, re.MULTILINE | re.DOTALL)
    names = {field.name for field in dataclasses.fields(EngineConfig)}

    def in_flags(words: str) -> str:
        return re.sub(
            r"`(\w+)`|\b(\w+_\w+)\b",
            lambda match: (
                f"--{name.replace('_', '-')}"
                if (name := match[1] or match[2]) in names
                else match[0]
            ),
            words,
        )

    return {name: in_flags(" ".join(words.split())) for name, words in found}
