"""Parse tool calls from generated text, while it is generated.

The chat template determines the format of calls: `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>` for Hermes and Qwen, or bare JSON for Llama 3; calls of gpt-oss are messages
(channels.py). Text is a call if it names a tool
and its arguments are an object; otherwise it stays text. Arguments are passed on as they come, as
the model writes them: whether they match the tool's schema is for the client to check.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from jaxserve.protocol.tools import Tool, function_named

Format = Literal["hermes", "llama", "harmony"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_SPACE = re.compile(r"\s*")
# The usual beginning of a call, after which its arguments are passed on.
_HEAD = re.compile(
    r'\{\s{0,64}"name"\s{0,64}:\s{0,64}"([a-zA-Z0-9_-]{1,64})"\s{0,64},\s{0,64}'
    r'"(?:arguments|parameters)"\s{0,64}:\s{0,64}(?=\{)'
)
_JSON_MARK = re.compile(r'["{}\[\]]')
_STRING_MARK = re.compile(r'["\\]')
_BETWEEN_OBJECTS = " \t\r\n,;[]"


def format_of(template: str) -> Format | None:
    """The tool call format of a chat template; None if it is unknown."""
    if "<|channel|>" in template:
        return "harmony"
    if _OPEN in template:
        return "hermes"
    return "llama" if '"parameters"' in template or _PYTHON_TAG in template else None


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call with its arguments as JSON text."""

    name: str
    arguments: str

    def body(self, call_id: str) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": call_id, "type": "function", "function": function}


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of an answer, in order.

    "call" begins a call of the tool `text`, whose "arguments" follow until "end". A last "cut" is
    the text of a call that does not end, or empty if the call was forced.
    """

    kind: Literal["reasoning", "content", "call", "arguments", "end", "cut"]
    text: str = ""


class ToolReader:
    """Incrementally separates text from tool calls in the output of one sequence."""

    def __init__(
        self,
        tools: Sequence[Tool],
        how: Format | Literal["named", "required"],
        parallel: bool,
    ) -> None:
        """`how` is the model's format, or that of `forced_schema`: "required", or "named" for the
        single tool in `tools`."""
        self._tools = tools
        self._how = how
        self._left = len(tools) * 64 if parallel else 1
        self._held = ""  # Text of which it is not known yet what it is.
        self._call_text = ""  # Text of the open call, tag included.
        self._json = _Json()
        self._pieces: list[Piece] = []
        self._called = self._said = False
        begin: dict[str, Callable[[], bool]] = {
            "hermes": self._text,
            "llama": self._first_object,
            "harmony": self._plain,
            "named": self._named,
            "required": self._between,
        }
        self._state = begin[how]

    def push(self, text: str) -> list[Piece]:
        """Add text; returns what is known about it and about the text before."""
        self._held += text
        while self._state():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[Piece]:
        """The rest, at the end of the text."""
        forced = self._how in ("named", "required")
        if self._state in (self._arguments, self._tail):
            ended = self._state == self._tail
            self._add("end" if ended else "cut", "" if ended or forced else self._call_text)
        elif not forced:
            self._content(self._held)
        pieces, self._pieces = self._pieces, []
        return pieces

    # States: each consumes held text, and returns whether another state continues with the rest.

    def _text(self) -> bool:
        """Text, until the tag of a call."""
        place = place_of(self._held, _OPEN)
        # Models put insignificant whitespace around calls.
        is_call = self._held.startswith(_OPEN, place)
        if (self._called or not self._said) and self._held[:place].isspace():
            return is_call and self._go(self._head)
        self._content(self._take(place))
        return is_call and self._go(self._head)

    def _first_object(self) -> bool:
        """The beginning of an answer that has nothing but calls, or no call."""
        begin = self._held.lstrip()
        if not begin or (_PYTHON_TAG.startswith(begin) and begin != _PYTHON_TAG):
            return False
        return self._go(self._head if begin.startswith(("{", _PYTHON_TAG)) else self._plain)

    def _head(self) -> bool:
        """A tag and the beginning of an object, until it is known whether it is a call."""
        begin = _SPACE.match(self._held).end()
        for tag in (_OPEN, _PYTHON_TAG):
            begin += len(tag) if self._held.startswith(tag, begin) else 0
        begin = _SPACE.match(self._held, begin).end()
        if begin == len(self._held):
            return False
        if self._held[begin] != "{":
            return self._no_call(begin)
        head = _HEAD.match(self._held, begin)
        if head is not None and function_named(self._tools, head[1]) is not None:
            self._begin(head[1], head.end(), depth=1)
            return self._go(self._arguments)
        fed = begin + self._json.fed
        end = self._json.feed(self._held[fed:])
        if end is None:
            return False
        end += fed
        call = self._call_of(self._held[begin:end])
        if call is None:
            return self._no_call(end)
        self._begin(call.name, end, depth=0)
        self._add("arguments", call.arguments)
        return self._go(self._tail)

    def _arguments(self) -> bool:
        """The object of a call's arguments."""
        end = self._json.feed(self._held)
        text = self._take(len(self._held) if end is None else end)
        self._call_text += text
        if text:
            self._add("arguments", text)
        if end is None:
            return False
        self._json = _Json(self._depth)
        return self._go(self._tail)

    def _tail(self) -> bool:
        """What follows a call's arguments: the rest of its object, and the closing tag."""
        rest = self._held.lstrip()
        if self._json.depth and not (self._how == "hermes" and rest.startswith("<")):
            end = self._json.feed(self._held)
            self._take(len(self._held) if end is None else end)
            if end is None:
                return False
            rest = self._held.lstrip()
        if self._how == "hermes":
            if _CLOSE.startswith(rest) and rest != _CLOSE:
                return False
            self._take(len(self._held) - len(rest) + len(_CLOSE) * rest.startswith(_CLOSE))
        self._add("end")
        self._json = _Json()
        return self._go(self._text if self._how == "hermes" else self._between)

    def _between(self) -> bool:
        """Separators of objects."""
        rest = self._held.lstrip(_BETWEEN_OBJECTS)
        if not rest:
            return False
        if rest.startswith("{"):
            self._take(len(self._held) - len(rest))
            return self._go(self._head)
        return self._go(self._plain)

    def _named(self) -> bool:
        """The beginning of the arguments of a call that is known."""
        begin = _SPACE.match(self._held).end()
        if begin == len(self._held):
            return False
        self._begin(self._tools[0].function.name, begin, depth=0)
        return self._go(self._arguments)

    def _plain(self) -> bool:
        """The rest of an answer, without calls."""
        self._content(self._take(len(self._held)))
        return False

    def _no_call(self, end: int) -> bool:
        self._json = _Json()
        self._content(self._take(end))
        return self._go(self._text if self._how == "hermes" else self._plain)

    def _begin(self, name: str, end: int, depth: int) -> None:
        """Begin a call, whose arguments follow at `end` of the held text, `depth` objects deep."""
        self._left -= 1
        self._called, self._depth = True, depth
        self._call_text = self._take(end)
        self._json = _Json()
        self._add("call", name)

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _take(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _content(self, text: str) -> None:
        if text and not (self._called and text.isspace()):
            self._said = True
            self._pieces.append(Piece("content", text))

    def _add(self, kind: Literal["call", "arguments", "end", "cut"], text: str = "") -> None:
        if self._left >= 0:
            self._pieces.append(Piece(kind, text))

    def _call_of(self, text: str) -> ToolCall | None:
        """The call that a whole object is, whatever the order of its properties."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        arguments = found.get("arguments", found.get("parameters"))
        name = found.get("name")
        known = isinstance(name, str) and function_named(self._tools, name) is not None
        if not known or not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


class _Json:
    """Finds the end of a JSON object that comes in pieces, by its brackets."""

    def __init__(self, depth: int = 0) -> None:
        """`depth` is the number of brackets that are open before the text."""
        self.depth = depth
        self.fed = 0
        self._in_string = self._escaped = False

    def feed(self, text: str) -> int | None:
        """The end of the object in the next piece of the text; None if it does not end there."""
        place = 1 if self._escaped and text else 0
        self._escaped = self._escaped and not text
        while mark := (_STRING_MARK if self._in_string else _JSON_MARK).search(text, place):
            place = mark.end()
            match mark[0]:
                case '"':
                    self._in_string = not self._in_string
                case "\\":
                    self._escaped = place == len(text)
                    place += 1
                case "{" | "[":
                    self.depth += 1
                case _:
                    self.depth -= 1
                    if self.depth <= 0:
                        return place
        self.fed += len(text)
        return None


def place_of(text: str, tag: str) -> int:
    """Index of a tag, or of a prefix of it that ends the text; len(text) if not found."""
    found = text.find(tag)
    if found >= 0:
        return found
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return len(text) - length
    return len(text)
