"""Messages of a conversation, as given in requests."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from jaxserve.protocol.field_types import Ignored, ListOf, valid_names
from jaxserve.protocol.fields import Fields
from jaxserve.protocol.tools import CalledTool


class TextPart(Fields):
    """A text part of a message. Images and audio are not supported; other fields are ignored."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    text: str


class Message(Fields):
    """One turn. The chat template defines the roles; the usual ones are system, user, assistant and
    tool. Fields that are not listed here are for the template, too."""

    model_config = ConfigDict(extra="allow")

    role: str = Field(examples=["user"])
    content: str | ListOf[TextPart] | None = Field(None, examples=["Hi!"])
    name: str | None = None
    tool_calls: ListOf[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="Newer name of reasoning_content.")

    # Clients send a response message back with all its fields; these are always empty here.
    refusal: None = None
    annotations: Ignored = None
    audio: None = None
    function_call: None = None

    _named = model_validator(mode="before")(valid_names)

    @property
    def text(self) -> str:
        """The content as the chat template gets it."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    def for_template(self) -> dict[str, Any]:
        message = {name: value for name, value in self if value is not None}
        for name in ("annotations", "tool_calls"):
            message.pop(name, None)
        if self.content is not None:
            message["content"] = self.text
        reasoning = self.reasoning_content or self.reasoning
        if reasoning:  # Templates have either name.
            message["reasoning_content"] = message["reasoning"] = reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
            if reasoning and not self.text:  # By the name in gpt-oss's template.
                message.setdefault("thinking", reasoning)
        return message
