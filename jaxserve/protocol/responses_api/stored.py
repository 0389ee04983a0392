"""Responses that a server keeps: for later requests to go on from, and for clients to read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, Literal, Self

from jaxserve.protocol.errors import FieldError
from jaxserve.protocol.responses_api.items import InputItem

Item = dict[str, Any]

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


@dataclasses.dataclass(frozen=True)
class StoredResponse:
    """A response's body, and all items that the model read for it: those of the responses before,
    and its own input."""

    response: dict[str, Any]
    input: list[Item]

    @property
    def id(self) -> str:
        return self.response["id"]

    @property
    def conversation(self) -> list[Item]:
        """What a request that goes on from it continues."""
        return [*self.input, *self.response["output"]]

    def to_json(self) -> bytes:
        # Text may have lone surrogates, which UTF-8 cannot encode: they become escapes.
        return json.dumps([self.response, self.input], separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        return cls(*json.loads(text))

    def input_items(
        self, order: Literal["asc", "desc"], limit: int, after: str | None
    ) -> dict[str, Any]:
        """OpenAI's list of at most `limit` items, from the one after `after` on. Raises
        FieldError."""
        items = self.input if order == "asc" else self.input[::-1]
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise FieldError("after", "is the id of no item of this response's input.")
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        return {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > limit,
        }


def stored_items(items: Sequence[InputItem], request_id: str) -> list[Item]:
    """Input items in the form of OpenAI's lists: with ids, and contents in parts."""
    return [_stored(item, f"{request_id}_in{place}") for place, item in enumerate(items)]


def _stored(item: InputItem, name: str) -> Item:
    fields = item.model_dump(exclude_none=True)
    prefix = _PREFIXES.get(item.type, "fco")
    if item.type == "message":
        kind = "output_text" if item.role == "assistant" else "input_text"
        fields["content"] = _parts(item, kind)
    elif item.type == "reasoning":
        fields.setdefault("summary", [])
        if item.content is not None:
            fields["content"] = _parts(item, "reasoning_text")
    return {**fields, "id": f"{prefix}_{name}", "status": "completed"}


def _parts(item: InputItem, kind: str) -> list[dict[str, Any]]:
    """The content of an item as parts, text as one of this kind."""
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    if isinstance(item.content, str):
        return [{"type": kind, "text": item.content, **more}]
    return [
        {"type": "refusal", "refusal": part.refusal or part.text}
        if part.type == "refusal"
        else {"type": kind, "text": part.text, **more}
        for part in item.content or ()
    ]
