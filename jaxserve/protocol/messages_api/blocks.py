"""Messages of `/v1/messages`, whose content is in blocks, as messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import ConfigDict

from jaxserve.protocol.chat.messages import Message, TextPart
from jaxserve.protocol.errors import FieldError
from jaxserve.protocol.field_types import JsonObject, ListOf
from jaxserve.protocol.fields import Fields

Text = str | ListOf[TextPart]


class Block(Fields):
    """Text, thinking, a tool's use or its result. Images and documents are not supported; other
    fields, such as `cache_control`, are ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "thinking", "redacted_thinking", "tool_use", "tool_result"]
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: JsonObject | None = None
    tool_use_id: str | None = None
    content: Text | None = None


class Turn(Fields):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | ListOf[Block]


def messages_of(turns: Sequence[Turn], system: Text | None) -> list[Message]:
    """The conversation of a request: each result of a tool is a message, like the text around it.
    Raises FieldError for a block without a field that it needs."""
    messages: list[dict[str, Any]] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    for place, turn in enumerate(turns):
        if isinstance(turn.content, str):
            messages.append({"role": turn.role, "content": turn.content})
        elif turn.role == "assistant":
            messages.append(_of_assistant(turn.content, f"messages[{place}]"))
        else:
            messages += _of_user(turn, f"messages[{place}]")
    return [Message.model_validate(message) for message in messages]


def _of_assistant(blocks: Sequence[Block], where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(blocks):
        within = f"{where}.content[{place}]"
        match block.type:
            case "text":
                texts.append(_given(block, "text", within))
            case "thinking":
                thoughts.append(_given(block, "thinking", within))
            case "tool_use":
                arguments = json.dumps(_given(block, "input", within), ensure_ascii=False)
                function = {"name": _given(block, "name", within), "arguments": arguments}
                call = {"id": _given(block, "id", within), "type": "function", "function": function}
                calls.append(call)
            case "tool_result":
                raise FieldError(f"{within}.type", "is 'tool_result', which only users send.")
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _of_user(turn: Turn, where: str) -> Iterator[dict[str, Any]]:
    texts: list[str] = []
    for place, block in enumerate(turn.content):
        within = f"{where}.content[{place}]"
        if block.type == "text":
            texts.append(_given(block, "text", within))
        elif block.type == "tool_result":
            if texts:
                yield {"role": turn.role, "content": "\n".join(texts)}
                texts = []
            name = _given(block, "tool_use_id", within)
            yield {"role": "tool", "tool_call_id": name, "content": block.content or ""}
        else:
            raise FieldError(f"{within}.type", f"is {block.type!r}, which only assistants send.")
    if texts or not turn.content:
        yield {"role": turn.role, "content": "\n".join(texts)}


def _given(block: Block, name: str, where: str) -> Any:
    value = getattr(block, name)
    if value is None:
        raise FieldError(
            f"{where}.{name}", "is missing; it is required.", "missing_required_parameter"
        )
    return value
