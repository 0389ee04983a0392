"""Take an output in the harmony format of gpt-oss apart, while it is generated.

An output is one message after another: `<|start|>assistant` (which the prompt has for the first),
`<|channel|>` and its name, `<|message|>`, a text, `<|end|>`. The channel `analysis` is reasoning,
and others are content; a message to `functions.f` is the arguments of a call of `f`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Literal

from jaxserve.protocol.parsing.tool_calls import Piece, place_of

_MARK, _MESSAGE = "<|", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
_END = re.compile("|".join(map(re.escape, _ENDS)))
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=functions\.([a-zA-Z0-9_-]+)")
_TO = "to="
_ANSWER = re.compile(r"<\|channel\|>\s*(?:final|commentary)|(?:^|<\|start\|>assistant)\s*to=")


def before_answer(text: str) -> str:
    """The part of an output that is reasoning, marks included."""
    found = _ANSWER.search(text)
    if found is not None:
        return text[: found.start()]
    return text if _CHANNEL.search(text) else ""


class ChannelReader:
    """Incrementally separates reasoning, content and calls in the output of one sequence, which has
    its special tokens. Messages to other recipients than `tools` are content."""

    def __init__(self, tools: Collection[str] = ()) -> None:
        self._tools = tools
        self._held = ""
        self._arguments = ""
        self._kind: Literal["reasoning", "content", "arguments"] | None = None  # None in a header

    def push(self, text: str) -> list[Piece]:
        """Add text; returns what is known about it and about the text before."""
        self._held += text
        pieces: list[Piece] = []
        while self._header(pieces) if self._kind is None else self._body(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        """The rest, at the end of the text."""
        pieces: list[Piece] = []
        if self._kind is not None:
            self._add(pieces, self._held)
            self._end(pieces)
        return pieces

    def _header(self, pieces: list[Piece]) -> bool:
        """What precedes a text, until it is whole. Text that is no header is content."""
        header, mark, rest = self._held.partition(_MESSAGE)
        if not mark:
            begin = self._held.lstrip()
            if any(begin.startswith(tag) or tag.startswith(begin) for tag in (_MARK, _TO)):
                return False
            self._kind = "content"
            return True
        self._held = rest
        to, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if to is not None and to[1] in self._tools:
            self._kind, self._arguments = "arguments", ""
            pieces.append(Piece("call", to[1]))
        else:
            reasons = channel is not None and channel[1] == "analysis"
            self._kind = "reasoning" if reasons else "content"
        return True

    def _body(self, pieces: list[Piece]) -> bool:
        """Text, until a mark ends it."""
        end = _END.search(self._held)
        if end is None:
            place = min(place_of(self._held, tag) for tag in _ENDS)
            self._add(pieces, self._held[:place])
            self._held = self._held[place:]
            return False
        self._add(pieces, self._held[: end.start()])
        begins = end[0] in ("<|start|>", "<|channel|>")
        self._held = self._held[end.start() if begins else end.end() :]
        self._end(pieces)
        return True

    def _add(self, pieces: list[Piece], text: str) -> None:
        if self._kind == "arguments":
            self._arguments += text
        if text:
            pieces.append(Piece(self._kind, text))

    def _end(self, pieces: list[Piece]) -> None:
        """The end of a message. Arguments that are no object are of a call that was cut off."""
        if self._kind == "arguments":
            whole = _is_object(self._arguments)
            pieces.append(Piece("end") if whole else Piece("cut", self._arguments))
        self._kind = None


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
