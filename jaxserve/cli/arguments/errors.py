"""Error messages of the command line, which names its options by their flags."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from jaxserve.cli.arguments.chosen import chosen, command_names, settings_of
from jaxserve.core.errors import JaxserveError
from jaxserve.core.vllm_settings import ANSWERS, SERVER_ANSWERS, answer_to

_POSITIONAL = {"model", "prompt", "input", "output", "command"}


def in_flags(message: str, command: Any) -> str:
    """A message with the names of settings as flags: `--max-num-seqs`, not `max_num_seqs`.

    `command` is the type of the command, or the union of several. Names of one word are flags
    only where a message begins with them: elsewhere they are words.
    """
    names = {setting.name for setting in settings_of(command)} - _POSITIONAL
    first, _, rest = message.partition(" ")
    if first in names and rest.startswith(("is ", "has ", "must ")):
        message = f"{_flag(first)} {rest}"
    several = "|".join(sorted((name for name in names if "_" in name), key=len, reverse=True))
    return re.sub(
        rf"(?<![\w/.'\"-])({several})(?![\w/'\"-]|\.\w)", lambda match: _flag(match[1]), message
    )


def reason(stop: BaseException, args: Sequence[str], command: Any) -> str | None:
    """Why `args` were refused, when it is an error of ours, an option of vLLM's or one that does
    not exist; else None. `command` is the union of the commands."""
    cause: BaseException | None = stop
    while cause is not None:
        if isinstance(cause, JaxserveError):
            return in_flags(str(cause), command)
        cause = cause.__cause__ or cause.__context__
    named = chosen(args, command)
    ours = set() if named is None else named.settings
    for word in args:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if name in ours:
            continue
        if word.startswith("--") and (answer := answer_to(name, ANSWERS | SERVER_ANSWERS)):
            return in_flags(answer, command).replace(name, _flag(name), 1)
    return _misspelt(args, command)


def _misspelt(args: Sequence[str], commands: Any) -> str | None:
    """Of arguments that were refused: the first that no command or option has as its name, and
    what it might mean. None if it is another mistake."""
    command = chosen(args, commands)
    if command is None:
        close = difflib.get_close_matches(args[0] if args else "", command_names(commands), n=1)
        return f"there is no command {args[0]!r}; did you mean {close[0]}?" if close else None
    known = {_flag(name) for name in command.settings}
    known |= {flag.replace("--", "--no-", 1) for flag in known}
    for word in args[len(command.words) :]:
        flag = word.partition("=")[0].replace("_", "-")
        if word == "--":
            break
        if word.startswith("--") and flag not in known and flag != "--help":
            negated = flag.startswith("--no-")
            likely = [name for name in known if name.startswith("--no-") == negated]
            close = difflib.get_close_matches(flag, sorted(likely), n=1)
            help_of = f"jaxserve {' '.join(command.words)} --help"
            hint = f"did you mean {close[0]}?" if close else f"`{help_of}` lists the options."
            return f"there is no option {flag}; {hint}"
    return None


def in_a_line(printed: str, args: Sequence[str], commands: Any) -> str | None:
    """tyro's error about the value of one option in our words; None for its other errors."""
    text = " ".join(printed.replace("│", " ").split())
    choice = re.search(
        r"invalid choice '(.*?)' for argument '(.*?)'\. Expected one of \((.*?)\)", text
    )
    if choice:
        known = [name for name in re.findall(r"'(.*?)'", choice[3]) if name != "None"]
        return f"{choice[2]} is {choice[1]!r}; it must be one of {', '.join(known)}."
    value = re.search(r"Error parsing (?:-\w/)?(--[\w-]+): (.*?)\.? [─-]{3}", text)
    command = chosen(args, commands)
    if value is None or command is None:
        return None
    return f"{value[1]}: {value[2]}; `jaxserve {' '.join(command.words)} --help` lists the options."


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
