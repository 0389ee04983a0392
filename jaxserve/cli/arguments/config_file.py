"""`--config FILE`: options of a command from a YAML file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxserve.cli.arguments.chosen import Chosen, Setting, chosen
from jaxserve.core.errors import ConfigError

_FLAG = "--config"


def with_config_file(args: Sequence[str], commands: Any) -> list[str]:
    """`args` with the options that the file of `--config` adds; those in `args` take precedence.

    `commands` is as for `chosen`. Raises ConfigError for a file that cannot be read, and for an
    option that the command does not have.
    """
    command = chosen(args, commands)
    if command is None or "config" not in command.settings:
        return list(args)
    path, args = _taken_out(args)
    if path is None:
        return args
    at = len(command.words)
    given = _given(args[at:])
    has_positional = bool(args[at:]) and not args[at].startswith("-")
    added: list[str] = []
    for name, value in _read(path).items():
        setting = _setting(path, str(name).replace("-", "_"), command)
        if setting.positional:
            if not has_positional:
                args = [*args[:at], *_words(path, setting, value), *args[at:]]
                at += 1
        elif setting.name not in given:
            added += _option(path, setting, value)
    return [*args, *added]


def _taken_out(args: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The path that follows `--config`, and the other arguments."""
    for at, word in enumerate(args):
        if word == _FLAG and at + 1 < len(args):
            return Path(args[at + 1]), [*args[:at], *args[at + 2 :]]
        if word.startswith(f"{_FLAG}="):
            return Path(word.partition("=")[2]), [*args[:at], *args[at + 1 :]]
    return None, list(args)


def _given(args: Sequence[str]) -> set[str]:
    """Names of the options in `args`."""
    flags = [word.partition("=")[0].lstrip("-") for word in args if word.startswith("-")]
    names = {flag.replace("-", "_") for flag in flags}
    return names | {name.removeprefix("no_") for name in names}


def _read(path: Path) -> Mapping[Any, Any]:
    """The options in a file. Raises ConfigError."""
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{_FLAG} {path} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_FLAG} {path} is not YAML: {' '.join(str(error).split())}") from None
    if read is not None and not isinstance(read, dict):
        raise ConfigError(f"{_FLAG} {path} must have lines such as `log-level: debug`.")
    return read or {}


def _setting(path: Path, name: str, command: Chosen) -> Setting:
    """Raises ConfigError if the command has no such setting."""
    known = command.settings
    if name in known and name != "config":
        return known[name]
    close = difflib.get_close_matches(name, known, n=1)
    words = " ".join(["jaxserve", *command.words])
    written, *close = (one.replace("_", "-") for one in (name, *close))
    hint = f"did you mean {close[0]!r}?" if close else f"`{words} --help` lists them."
    raise ConfigError(f"{path} has {written!r}, which is no option of `{words}`; {hint}")


def _option(path: Path, setting: Setting, value: Any) -> list[str]:
    """As on a command line. Null is the default."""
    flag = "--" + setting.name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    words = _words(path, setting, value)
    return [flag, *words] if isinstance(value, list) else [f"{flag}={words[0]}"]


def _words(path: Path, setting: Setting, value: Any) -> list[str]:
    several = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str | int | float) for one in several):
        raise ConfigError(f"{path} has {setting.name!r} {value!r}; give a text, number or list.")
    words = [str(one) for one in several]
    return [",".join(words)] if setting.is_list_of_integers else words
