"""Responses that a server keeps: for later requests to continue from, and for clients to read."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Sequence
from typing import Any, Literal, Self

from jaxserve.protocol.errors import FieldError
from jaxserve.protocol.responses_api.items import InputItem

Item = dict[str, Any]

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


@dataclasses.dataclass(frozen=True)
class Conversation:
    """Items as the text of a JSON list, which takes less memory than objects, and can be shared by
    requests that continue from it."""

    text: bytes
    num_items: int

    @classmethod
    def of(cls, items: Sequence[Item]) -> Self:
        return cls(_to_json(items), len(items))

    def __add__(self, other: Conversation) -> Conversation:
        parts = [each.text[1:-1] for each in (self, other) if each.num_items]
        return Conversation(b"[%b]" % b",".join(parts), self.num_items + other.num_items)

    @property
    def items(self) -> list[Item]:
        return json.loads(self.text)


EMPTY_CONVERSATION = Conversation(b"[]", 0)


@dataclasses.dataclass(frozen=True)
class StoredResponse:
    """A response's body as JSON, and the conversation that a request continues with from it: the
    items of the responses before, its own input, and its output. The model read the first
    `num_input` of them."""

    id: str
    response: bytes
    conversation: Conversation
    num_input: int
    status: str
    in_background: bool

    @classmethod
    def of(cls, response: dict[str, Any], read: Conversation) -> Self:
        """`read`: all items that the model read."""
        whole = read + Conversation.of(response["output"])
        return cls(
            response["id"],
            _to_json(response),
            whole,
            read.num_items,
            response["status"],
            response["background"],
        )

    @property
    def is_complete(self) -> bool:
        return self.status not in ("queued", "in_progress")

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.conversation.text)

    def input_items(
        self, order: Literal["asc", "desc"], limit: int, after: str | None
    ) -> dict[str, Any]:
        """OpenAI's list of at most `limit` items, from the one after `after` on. Raises
        FieldError."""
        items = self.conversation.items[: self.num_input]
        if order == "desc":
            items.reverse()
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


def input_of(items: Sequence[InputItem]) -> Conversation:
    """A request's own items in the form of OpenAI's lists: with ids, and contents in parts."""
    name = uuid.uuid4().hex
    return Conversation.of([_stored(item, f"{name}_{place}") for place, item in enumerate(items)])


def _to_json(value: Any) -> bytes:
    # Text may have lone surrogates, which UTF-8 cannot encode: they become escapes.
    return json.dumps(value, separators=(",", ":")).encode()


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
