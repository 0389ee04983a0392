"""Separate a model's reasoning from its answer, in generated text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from jaxserve.core.settings.chat_settings import ReasoningParser
from jaxserve.protocol.errors import FieldError
from jaxserve.protocol.parsing.channels import before_answer
from jaxserve.protocol.parsing.tool_calls import Piece, place_of
from jaxserve.text import Tokenizer
from jaxserve.text.thinking import CLOSE as _CLOSE
from jaxserve.text.thinking import OPEN as _OPEN
from jaxserve.text.thinking import has_channels

Marks = Literal["tags", "channels"]
"""How reasoning is marked: by `<think>` and `</think>`, or as gpt-oss does (channels.py)."""


def reasoning_marks(parser: ReasoningParser, template: str | None) -> Marks | None:
    """How a model with this chat template marks its reasoning, if it does."""
    match parser:
        case "auto":
            if has_channels(template):
                return "channels"
            return "tags" if _CLOSE in (template or "") else None
        case "none":
            return None
        case "openai_gptoss":
            return "channels"
    return "tags"


def check_budget(marks: Marks | None) -> None:
    """Raises FieldError unless reasoning that is marked so can be ended by tokens."""
    if marks is None:
        raise FieldError(
            "thinking_token_budget",
            "needs a reasoning parser, and this model's chat template marks no reasoning; leave it "
            "out, or start the server with --reasoning-parser.",
        )
    if marks == "channels":
        raise FieldError(
            "thinking_token_budget",
            "is not supported with the reasoning parser openai_gptoss, whose reasoning is ended by "
            "the header of another message and not by one tag; leave it out.",
        )


class ReasoningReader:
    """Incrementally separates reasoning from content in the output of one sequence. Space around
    the reasoning is left out."""

    def __init__(self, begun: str | None) -> None:
        """`begun`: the reasoning that the prompt ends within; None: the output may begin with
        some."""
        self._state: Literal["begin", "reasoning", "margin", "content"] = (
            "begin" if begun is None else "reasoning"
        )
        self._reasoned = bool(begun and begun.strip())  # Then space at the beginning is in between.
        self._held = ""

    def push(self, text: str) -> list[Piece]:
        """Add text; returns what is known about it and about the text before."""
        self._held += text
        pieces = []
        if self._state == "begin":
            begin = self._held.lstrip()
            if _OPEN.startswith(begin) and begin != _OPEN:
                return []
            if begin.startswith(_OPEN):
                self._state, self._held = "reasoning", begin.removeprefix(_OPEN)
            else:
                self._state = "content"
        if self._state == "reasoning":
            pieces += self._reasoning()
        if self._state == "margin":
            self._held = self._held.lstrip()
            self._state = "content" if self._held else "margin"
        if self._state == "content" and self._held:
            pieces.append(Piece("content", self._held))
            self._held = ""
        return pieces

    def finish(self) -> list[Piece]:
        """The rest, at the end of the text."""
        if self._state == "reasoning":
            rest = self._held.rstrip()
            return [Piece("reasoning", rest)] if rest else []
        return [Piece("content", self._held)] if self._held else []

    def _reasoning(self) -> list[Piece]:
        place = place_of(self._held, _CLOSE)
        text, rest = self._held[:place], self._held[place:]
        if not self._reasoned:
            text = text.lstrip()
        shown = text.rstrip()
        self._reasoned = self._reasoned or bool(shown)
        if rest.startswith(_CLOSE):
            self._state, self._held = "margin", rest.removeprefix(_CLOSE)
        else:
            self._held = text[len(shown) :] + rest
        return [Piece("reasoning", shown)] if shown else []


def num_reasoning_tokens(
    tokenizer: Tokenizer, text: str, token_ids: Sequence[int], marks: Marks, is_open: bool
) -> int:
    """How many tokens of an output are reasoning, marks included; `is_open`: it begins within tags
    that the prompt opened."""
    if marks == "channels":
        reasoned = before_answer(text)
        if reasoned == text:
            return len(token_ids) if text else 0
    else:
        if not is_open and not text.lstrip().startswith(_OPEN):
            return 0
        before, closing, _ = text.partition(_CLOSE)
        if not closing:
            return len(token_ids)
        reasoned = before + closing
    left = len(reasoned.encode("utf-8", "surrogatepass"))
    for number, token_id in enumerate(token_ids):
        if left <= 0:
            return number
        left -= len(tokenizer.token_bytes(token_id))
    return len(token_ids)
