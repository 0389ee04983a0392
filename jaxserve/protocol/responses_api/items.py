"""Input items of `/v1/responses`, as messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import ConfigDict

from jaxserve.protocol.chat.messages import Message
from jaxserve.protocol.errors import FieldError
from jaxserve.protocol.field_types import ListOf
from jaxserve.protocol.fields import Fields

_ROLES = {"developer": "system"}  # Chat templates do not know the newer name.


class ContentPart(Fields):
    """A text part. Images, audio and files are not supported; other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"]
    text: str = ""
    refusal: str = ""


class InputItem(Fields):
    """A message, a call that the model made, its output, or the model's reasoning. Output items of
    a response can be sent back as they are; other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: str | None = None
    content: str | ListOf[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | ListOf[ContentPart] | None = None
    summary: ListOf[ContentPart] | None = None


def messages_of(
    items: Sequence[InputItem], instructions: str | None, earlier: Sequence[InputItem] = ()
) -> list[Message]:
    """The conversation of a request, after the items of `earlier` ones. Calls and reasoning become
    parts of the assistant's message that they belong to. Raises FieldError for an item without a
    field that it needs."""
    for place, item in enumerate(items):
        _check(item, f"input[{place}]")
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    reasoning, answering = "", False  # `answering`: the last message is the assistant's, open.
    for item in [*earlier, *items]:
        if item.type == "reasoning":
            reasoning += _text(item.content) or _text(item.summary)
            continue
        if item.type == "function_call_output":
            message = {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
            messages.append(message)
            answering = False
            continue
        role = "assistant" if item.type == "function_call" else _ROLES.get(item.role, item.role)
        if role != "assistant" or item.type == "message" or not answering:
            messages.append({"role": role})
            if role == "assistant" and reasoning:
                messages[-1]["reasoning_content"] = reasoning
            reasoning = ""
        if item.type == "message":
            messages[-1]["content"] = _text(item.content)
        else:
            function = {"name": item.name, "arguments": item.arguments}
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": function})
        answering = role == "assistant"
    return [Message.model_validate(message) for message in messages]


def _text(content: str | Sequence[ContentPart] | None) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text or part.refusal for part in content or ())


_NEEDED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}


def _check(item: InputItem, where: str) -> None:
    for name in _NEEDED[item.type]:
        if getattr(item, name) is None:
            raise FieldError(
                f"{where}.{name}", "is missing; it is required.", "missing_required_parameter"
            )
