"""Error messages of the command line, which names its options by their flags."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args, get_type_hints

from jaxserve.core.errors import JaxserveError
from jaxserve.core.vllm_settings import ANSWERS, answer_to

_POSITIONAL = {"model", "prompt", "input", "output", "command"}


def in_flags(message: str, command: Any) -> str:
    """A message with the names of settings as flags: `--max-num-seqs`, not `max_num_seqs`.

    `command` is the type of the command, or the union of several. Names of one word are flags
    only where a message begins with them: elsewhere they are words.
    """
    names = set(_fields(command)) - _POSITIONAL
    first, _, rest = message.partition(" ")
    if first in names and rest.startswith(("is ", "has ", "must ")):
        message = f"{_flag(first)} {rest}"
    several = "|".join(sorted((name for name in names if "_" in name), key=len, reverse=True))
    return re.sub(
        rf"(?<![\w/.'\"-])({several})(?![\w/'\"-]|\.\w)", lambda match: _flag(match[1]), message
    )


def reason(stop: BaseException, args: Sequence[str], command: Any) -> str | None:
    """Why `args` were refused, when it is an error of ours or an option of vLLM's; else None."""
    cause: BaseException | None = stop
    while cause is not None:
        if isinstance(cause, JaxserveError):
            return in_flags(str(cause), command)
        cause = cause.__cause__ or cause.__context__
    for word in args:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and name in ANSWERS:
            return in_flags(answer_to(name), command).replace(name, _flag(name), 1)
    return None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _fields(kind: Any) -> Iterator[str]:
    """The names of a dataclass's fields, and of those within them; of each member of a union."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            yield from list(_fields(hints[field.name])) or [field.name]
    for part in get_args(kind):
        yield from _fields(part)
