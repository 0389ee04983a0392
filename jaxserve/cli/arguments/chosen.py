"""Which command a command line is for, and what settings that command has."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args, get_type_hints

from tyro.conf import Positional


class Setting(NamedTuple):
    """A field of a command, or of a dataclass within it."""

    name: str
    positional: bool
    is_list_of_integers: bool


class Chosen(NamedTuple):
    """A command and its words: `serve`, or `bench offline`."""

    words: list[str]
    kind: type

    @property
    def settings(self) -> dict[str, Setting]:
        return {setting.name: setting for setting in settings_of(self.kind)}


def chosen(args: Sequence[str], commands: Any) -> Chosen | None:
    """The command of `args`, None where these name none. `commands` is a union of types, each
    annotated as a subcommand with its name."""
    for name, kind in _kinds(commands).items():
        if args and args[0] == name:
            kinds = get_type_hints(kind, include_extras=True).get("kind")
            if kinds is None:
                return Chosen([args[0]], kind)
            inner = chosen(args[1:], kinds)
            return inner and Chosen([args[0], *inner.words], inner.kind)
    return None


def group_of(args: Sequence[str], commands: Any) -> tuple[list[str], list[str]]:
    """For `args` that name no command: their words that name a group of commands, such as `bench`,
    and the commands that can follow."""
    kinds = _kinds(commands)
    if not args or args[0] not in kinds:
        return [], list(kinds)
    inner = get_type_hints(kinds[args[0]], include_extras=True)["kind"]
    words, names = group_of(args[1:], inner)
    return [args[0], *words], names


def settings_of(kind: Any) -> Iterator[Setting]:
    """The fields of a dataclass and of those within it; of each member of a union."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            hint = hints[field.name]
            positional = any(part in get_args(Positional[int]) for part in get_args(hint)[1:])
            own = Setting(field.name, positional, tuple[int, ...] in (hint, *get_args(hint)))
            yield from list(settings_of(hint)) or [own]
    for part in get_args(kind):
        yield from settings_of(part)


def _kinds(commands: Any) -> dict[str, type]:
    """The types of a union's commands by their names."""
    found = {}
    for command in _members(commands):
        kind, *annotations = get_args(command)
        names = [note.name for note in annotations if hasattr(note, "name")]
        found |= dict.fromkeys(names, kind)
    return found


def _members(union: Any) -> Iterator[Any]:
    """The annotated members of a union, which may itself be annotated."""
    for part in get_args(union):
        if isinstance(get_args(part)[:1] and get_args(part)[0], type):
            yield part
        else:
            yield from _members(part)
