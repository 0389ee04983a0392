"""Parse tool calls from generated text.

The chat template determines the format of calls: `<tool_call>{"name": ..., "arguments":
{...}}</tool_call>` for Hermes and Qwen, or bare JSON for Llama 3. A call is valid if its function
exists and its arguments match the schema; otherwise it stays text.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any, Literal

from jaxserve.protocol.tools import Tool, function_named

Format = Literal["hermes", "llama"]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"\s*")
_READS_TOOLS = re.compile(r"\btools\b")


def knows_tools(template: str | None) -> bool:
    """Whether a chat template supports tools."""
    return template is not None and bool(_READS_TOOLS.search(template))


def format_of(template: str) -> Format | None:
    """The tool call format of a chat template; None if it is unknown."""
    if _OPEN in template:
        return "hermes"
    return "llama" if '"parameters"' in template or "<|python_tag|>" in template else None


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call with its arguments as JSON text."""

    name: str
    arguments: str

    def body(self, call_id: str) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": call_id, "type": "function", "function": function}


class ToolReader:
    """Incrementally separates text from tool calls in the output of one sequence.

    Text that may be part of a call is held back until the end of the output.
    """

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
        self._most = len(tools) * 64 if parallel else 1
        self._held = ""
        self._plain = False

    def push(self, text: str) -> str:
        """Add text; returns the text that is certainly not part of a call."""
        if self._plain:
            return text
        self._held += text
        if self._how == "hermes":
            return self._release(_place_of(self._held, _OPEN))
        if self._how == "llama":
            begin = self._held.lstrip()
            self._plain = bool(begin) and not begin.startswith(("{", "<"))
            return self._release(len(self._held) if self._plain else 0)
        return ""

    def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        """The rest of the text, and the calls."""
        held, self._held = self._held, ""
        if self._how == "hermes":
            return self._hermes(held)
        if self._how == "llama":
            calls = self._listed(held)
            return ("", tuple(calls[: self._most])) if calls else (held, ())
        # The text of a forced call that was cut off is no content either.
        return "", tuple(self._forced(held)[: self._most])

    def _release(self, end: int) -> str:
        text, self._held = self._held[:end], self._held[end:]
        return text

    def _hermes(self, held: str) -> tuple[str, tuple[ToolCall, ...]]:
        calls: list[ToolCall] = []
        rest, place = "", 0
        while (begin := held.find(_OPEN, place)) >= 0:
            found, end = _block(held, begin + len(_OPEN))
            call = self._call(found)
            rest += held[place : begin if call else end]
            calls += [call] if call else []
            place = end
        rest += held[place:]
        # Models put insignificant newlines between and after calls.
        return rest if rest.strip() or not calls else "", tuple(calls[: self._most])

    def _forced(self, held: str) -> list[ToolCall]:
        """Calls that were sampled under `forced_schema`, so that they need no check."""
        value = _json(held)
        if self._how == "named":
            value = [{"name": self._tools[0].function.name, "arguments": value}]
        calls = value if isinstance(value, list) else []
        found = []
        for call in calls:
            match call:
                case {"name": str(name), "arguments": dict(arguments)}:
                    found.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))
        return found

    def _listed(self, held: str) -> list[ToolCall]:
        """Calls as a JSON list, or as consecutive objects; none unless all are valid."""
        objects = _json_objects(held.strip().removeprefix("<|python_tag|>"))
        calls = [self._call(found) for found in objects]
        return [] if None in calls else calls

    def _call(self, found: Any) -> ToolCall | None:
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return None
        function = function_named(self._tools, found["name"])
        arguments = found.get("arguments", found.get("parameters"))
        if function is None or not function.accepts(arguments):
            return None
        return ToolCall(function.name, json.dumps(arguments, ensure_ascii=False))


def _place_of(text: str, tag: str) -> int:
    """Index of a tag, or of a prefix of it that ends the text; len(text) if not found."""
    found = text.find(tag)
    if found >= 0:
        return found
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return len(text) - length
    return len(text)


def _block(text: str, begin: int) -> tuple[Any, int]:
    """The JSON of a call after its opening tag, and the end of the call, at its closing tag or the
    end of the text; (None, begin) if it is not a call."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, _SPACE.match(text, begin).end())
    except (ValueError, RecursionError):
        return None, begin
    end = _SPACE.match(text, end).end()
    if text.startswith(_CLOSE, end):
        return value, end + len(_CLOSE)
    return (value, end) if end == len(text) else (None, begin)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _json_objects(text: str) -> list[Any]:
    """The JSON values of a text, separated by whitespace or semicolons; [] if it has other text."""
    decoder, found = json.JSONDecoder(), []
    try:
        while text:
            value, end = decoder.raw_decode(text)
            found += value if isinstance(value, list) else [value]
            text = text[end:].lstrip("; \n\t")
    except (ValueError, RecursionError):
        return []
    return found
