"""Error messages of the command line, which names its options by their flags."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from jaxserve.cli.arguments.chosen import chosen, group_of, settings_of
from jaxserve.core.errors import JaxserveError
from jaxserve.core.settings.vllm_settings import ANSWERS, SERVER_ANSWERS, answer_to

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
    named = chosen(args, command)
    while cause is not None:
        if isinstance(cause, JaxserveError):
            # Not the flags of other commands: search's are keys of speculative_config elsewhere.
            return in_flags(str(cause), command if named is None else named.kind)
        cause = cause.__cause__ or cause.__context__
    ours = set() if named is None else named.settings
    for word in args:
        name = word.removeprefix("--").removeprefix("no-").partition("=")[0].replace("-", "_")
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
        return _not_a_command(args, commands)
    known = {_flag(name) for name in command.settings}
    known |= {flag.replace("--", "--no-", 1) for flag in known}
    for word in args[len(command.words) :]:
        flag = word.partition("=")[0].replace("_", "-")
        if word == "--":
            break
        if word.startswith("--") and flag not in known and flag != "--help":
            close = _alike(flag, known)
            help_of = f"jaxserve {' '.join(command.words)} --help"
            hint = f"did you mean {close[0]}?" if close else f"`{help_of}` lists the options."
            return f"there is no option {flag}; {hint}"
    return None


def _alike(flag: str, known: set[str]) -> list[str]:
    """At most one flag that is spelt alike, or has this word: --base-url for --url."""
    start = "--no-" if flag.startswith("--no-") else "--"
    likely = {
        name.removeprefix(start): name
        for name in sorted(known)
        if name.startswith("--no-") == (start == "--no-")
    }
    word = flag.removeprefix(start)
    close = difflib.get_close_matches(word, likely, n=1)
    close = close or [name for name in likely if word in name.split("-")]
    return [likely[name] for name in close[:1]]


def _not_a_command(args: Sequence[str], commands: Any) -> str:
    words, names = group_of(args, commands)
    group, left = " ".join(["jaxserve", *words]), args[len(words) :]
    if not left or left[0].startswith("-"):
        before = f" before {left[0]}" if left else ""
        return f"`{group}` needs a command{before}: {', '.join(names)}."
    close = difflib.get_close_matches(left[0], names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(names)}."
    of = f" of `{group}`" if words else ""
    return f"there is no command {left[0]!r}{of}; {hint}"


def in_a_line(printed: str, args: Sequence[str], commands: Any) -> str | None:
    """tyro's error about arguments or the value of one option in our words; None for its other
    errors."""
    text = " ".join(printed.replace("│", " ").split())
    choice = re.search(
        r"invalid choice '(.*?)' for argument '(.*?)'\. Expected one of \((.*?)\)", text
    )
    if choice:
        known = [name for name in re.findall(r"'(.*?)'", choice[3]) if name != "None"]
        return f"{choice[2]} is {choice[1]!r}; it must be one of {', '.join(known)}."
    command = chosen(args, commands)
    if command is None:
        return None
    help_of = f"`jaxserve {' '.join(command.words)} --help`"
    if value := re.search(r"Error parsing (?:-\w/)?(--[\w-]+): (.*?)\.? [─-]{3}", text):
        return f"{value[1]}: {value[2]}; {help_of} lists the options."
    if bare := re.search(r"Missing value for argument '(?:command\.)?([^']+)'", text):
        name = bare[1].upper() if bare[1] in _POSITIONAL else bare[1].partition("/")[0]
        return f"{name} has no value; {help_of} lists the arguments."
    if extra := re.search(r"Unrecognized options: ([^\s,]+)", text):
        if hint := _in_place_of(extra[1], args, command):
            return f"there is no argument {extra[1]!r}; {hint}"
        quotes = " Put a prompt of several words into quotes." * ("prompt" in command.settings)
        return f"there is no argument {extra[1]!r}; {help_of} lists the arguments.{quotes}"
    if "Missing from" in text:
        # The border is of spaces where the terminal has no lines.
        missing = re.findall(r"^[│ ] {5}((?:--)?[A-Za-z][\w-]*)[^a-z]*$", printed, re.MULTILINE)
        is_or_are = "is" if len(missing) == 1 else "are"
        return f"{' and '.join(missing)} {is_or_are} missing; {help_of} lists the arguments."
    return None


def _in_place_of(word: str, args: Sequence[str], command: Any) -> str | None:
    """What to write in the place of an argument that is not there; None if that is not known."""
    before = args[args.index(word) - 1] if word in args[1:] else ""
    if word.lower() in ("true", "false", "0", "1") and before.startswith("--"):
        negated = before.replace("--", "--no-", 1)
        return f"write {before} for yes and {negated} for no, without a value."
    if word == "-m":
        return "write --model."
    takes_none = not any(setting.positional for setting in command.settings.values())
    if "model" in command.settings and takes_none:
        return f"a model is given by --model: --model {word}."
    return None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
