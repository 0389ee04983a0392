"""Responses in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from jaxserve.protocol.response_models import ErrorBody, MessageError


def _errors(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    return {
        "4XX": {"model": model, "description": "The request is rejected; the error says why."},
        503: {"model": model, "description": "The server is not accepting requests."},
    }


ERRORS = _errors(ErrorBody)
MESSAGE_ERRORS = _errors(MessageError)
"""In Anthropic's format."""


_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}
"""One server-sent event, with JSON as its data: before OpenAPI 3.2 the schema of a stream is taken
for that of each event."""


def documented_responses(model: type[Any], stream: bool = False) -> dict[int | str, dict[str, Any]]:
    """A successful response: JSON, and also server-sent events with `stream`."""
    answer: dict[str, Any] = {"model": model, "description": "The response."}
    if stream:
        answer["content"] = {"text/event-stream": {"schema": _EVENT}}
    return {200: answer}
