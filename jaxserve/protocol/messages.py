"""Messages of a conversation, as given in requests."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from jaxserve.protocol.fields import Fields, ListOf
from jaxserve.protocol.tools import CalledTool


class TextPart(Fields):
    """A text part of a message. Images and audio are not supported."""

    type: Literal["text"]
    text: str


class Message(Fields):
    """One turn. The chat template defines the roles; the usual ones are system, user, assistant and
    tool."""

    role: str = Field(examples=["user"])
    content: str | ListOf[TextPart] | None = Field(None, examples=["Hi!"])
    name: str | None = None
    tool_calls: ListOf[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    # Clients send a response message back with all its fields; these are always empty here.
    refusal: None = None
    annotations: ListOf[None] | None = Field(None, max_length=0)
    audio: None = None
    function_call: None = None

    def for_template(self) -> dict[str, Any]:
        message = self.model_dump(exclude_none=True, exclude={"tool_calls", "annotations"})
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message
