"""What a model's output is made of: reasoning, content and tool calls."""

from __future__ import annotations

import dataclasses
from typing import Self

from jaxserve.protocol.parsing.channels import ChannelReader
from jaxserve.protocol.parsing.reasoning import ReasoningReader
from jaxserve.protocol.parsing.tool_calls import Piece, ToolCall, ToolReader


class AnswerReader:
    """Incrementally takes the output of one sequence apart."""

    def __init__(
        self, reasoning: ReasoningReader | ChannelReader | None, tools: ToolReader | None
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def push(self, text: str) -> list[Piece]:
        """Add text; returns what is known about it and about the text before."""
        if self._reasoning is not None:
            return self._with_calls(self._reasoning.push(text))
        return self._with_calls([Piece("content", text)] if text else [])

    def finish(self) -> list[Piece]:
        """The rest, at the end of the text."""
        pieces = []
        if self._reasoning is not None:
            pieces += self._with_calls(self._reasoning.finish())
        if self._tools is not None:
            pieces += self._tools.finish()
        return pieces

    def _with_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._tools is None:
            return pieces
        found = []
        for piece in pieces:
            found += self._tools.push(piece.text) if piece.kind == "content" else [piece]
        return found


@dataclasses.dataclass(frozen=True)
class Answer:
    """A complete output. A call that was cut off is content, or nothing if it was forced."""

    reasoning: str
    content: str
    calls: tuple[ToolCall, ...]

    @classmethod
    def of(cls, reader: AnswerReader, text: str) -> Self:
        """`text` taken apart by a new reader."""
        reasoning, content, name, arguments = "", "", "", ""
        calls: list[ToolCall] = []
        for piece in [*reader.push(text), *reader.finish()]:
            match piece.kind:
                case "reasoning":
                    reasoning += piece.text
                case "content" | "cut":
                    content += piece.text
                case "call":
                    name, arguments = piece.text, ""
                case "arguments":
                    arguments += piece.text
                case "end":
                    calls.append(ToolCall(name, arguments))
        return cls(reasoning, content, tuple(calls))
