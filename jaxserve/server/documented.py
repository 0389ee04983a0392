"""Answers as the OpenAPI document describes them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from jaxserve.protocol.responses import ErrorBody

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is refused; the error says why."},
    503: {"model": ErrorBody, "description": "The server takes no requests now."},
}


def answered(model: type[BaseModel], stream: bool = False) -> dict[int | str, dict[str, Any]]:
    """A good answer: JSON, or also server-sent events."""
    answer: dict[str, Any] = {"model": model, "description": "The answer."}
    if stream:
        answer["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    return {200: answer}
