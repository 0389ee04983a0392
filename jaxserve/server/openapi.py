"""Responses in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from jaxserve.protocol.responses import ErrorBody

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is rejected; the error says why."},
    503: {"model": ErrorBody, "description": "The server is not accepting requests."},
}


def documented_responses(
    model: type[BaseModel], stream: bool = False
) -> dict[int | str, dict[str, Any]]:
    """A successful response: JSON, and also server-sent events with `stream`."""
    answer: dict[str, Any] = {"model": model, "description": "The response."}
    if stream:
        answer["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: answer}
