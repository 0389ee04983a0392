"""Command lines and programs that the documents and `jaxserve --help` show, as they stand there."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, get_args
from unittest import mock

from jaxserve import cli

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHELLS = {"sh", "bash", "console"}
_HELP_EXAMPLE = re.compile(r"^ *(jaxserve .*?)(?: {3,}.*)?$", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block: its document, relative to the repository, its language, its text, and the
    number of headings before it."""

    document: str
    language: str
    text: str
    section: int


class Line(NamedTuple):
    """One line for a shell, with lines that are continued joined, and where it is shown."""

    document: str
    text: str

    @property
    def words(self) -> list[str]:
        """As the shell takes them apart, without comment, `&` and redirection."""
        words = shlex.split(self.text, comments=True)
        ends = [words.index(mark) for mark in ("&", ">", "<") if mark in words]
        return words[: min(ends, default=len(words))]

    @property
    def program(self) -> str:
        """The first word that sets no variable."""
        return next(word for word in self.words if not re.match(r"[A-Z_]+=", word))

    @property
    def command(self) -> Any:
        """What jaxserve's own parser makes of the line. Raises what that raises."""
        return parsed(self.words[self.words.index("jaxserve") + 1 :])


def parsed(args: Iterable[str]) -> Any:
    """The settings of one command; of `bench`, those of its kind."""
    return _parsed(tuple(args))


@functools.cache
def _parsed(args: tuple[str, ...]) -> Any:
    command = cli.parse(args)
    return getattr(command, "kind", command)


@functools.cache
def blocks() -> list[Block]:
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for fenced in _FENCED.finditer(text):
            section = text.count("\n## ", 0, fenced.start())
            found.append(Block(str(document.relative_to(ROOT)), *fenced.groups(), section))
    return found


@functools.cache
def lines() -> list[Line]:
    """All command lines, jaxserve's and others."""
    shown = [
        Line(block.document, line)
        for block in blocks()
        if block.language in _SHELLS
        for line in block.text.replace("\\\n", " ").splitlines()
    ]
    shown += [Line("--help", line) for line in _HELP_EXAMPLE.findall(_all_help())]
    return [line for line in shown if line.words]


@functools.cache
def spans() -> list[Line]:
    """Command lines in running text: `jaxserve ...` between single quotes of code."""
    return [
        Line(str(document.relative_to(ROOT)), span)
        for document in DOCUMENTS
        for span in re.findall(
            r"`(jaxserve [^`]+)`", _FENCED.sub("", document.read_text(encoding="utf-8"))
        )
    ]


def command_names() -> set[str]:
    return {get_args(command)[1].name for command in get_args(cli.Subcommand)}


def _all_help() -> str:
    return "\n".join(map(_help, [(), *((name,) for name in command_names()), ("bench", "serve")]))


def _help(args: tuple[str, ...]) -> str:
    printed = io.StringIO()
    wide = mock.patch.dict(os.environ, COLUMNS="120")  # No example is wrapped.
    with wide, contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        cli.parse([*args, "--help"])
    return printed.getvalue()
