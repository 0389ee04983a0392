"""The response of `/v1/responses`: whole, or streamed in events."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxserve.core.requests.outputs import Delta, RequestMetrics, RequestOutput
from jaxserve.protocol.chat.reply import ParsedBlocks, call_id
from jaxserve.protocol.errors import ErrorReply
from jaxserve.protocol.parsing.tool_calls import Piece
from jaxserve.protocol.responses_api.stored import EMPTY_CONVERSATION, Conversation, StoredResponse

ResponsesEvent = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ParsedResponses(ParsedBlocks):
    """A chat request, answered in items. `described` are fields that repeat the request; `before`
    are the items that it continues from, and `input` its own. `keep` stores the response, and tells
    whether it did."""

    described: dict[str, Any]
    before: Conversation = EMPTY_CONVERSATION
    input: Conversation = EMPTY_CONVERSATION
    keep: Callable[[StoredResponse], bool] | None = None

    @property
    def in_background(self) -> bool:
        return self.described["background"]

    def response(
        self, outputs: Sequence[RequestOutput], request_id: str, created: int
    ) -> dict[str, Any]:
        """The response body: that of the last event of a stream."""
        return self.chunks(request_id, created).whole(outputs)

    def chunks(self, request_id: str, created: int) -> ResponsesChunks:
        """The response in streamed events."""
        if self.keep is not None:  # A proxy may give one id to several requests.
            request_id = f"{request_id}-{uuid.uuid4().hex[:8]}"
        return ResponsesChunks(self, request_id, created)

    def store(self, response: dict[str, Any]) -> bool:
        """Store a response in its present state. False if it is too large, or not to be stored."""
        read = self.before + self.input
        return self.keep is not None and self.keep(StoredResponse.of(response, read))

    def usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        counted = self.chat.usage(outputs)
        details = counted.get("completion_tokens_details", {})
        cached = counted.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": counted["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
            "total_tokens": counted["total_tokens"],
        }


def _duration_s(times: RequestMetrics) -> int:
    """Whole seconds that a request took, as far as it says."""
    return (times.finish_us - times.arrival_us) // 1_000_000 if times.finish_us is not None else 0


class ResponsesChunks:
    """Events of a streamed response: those of one item after the other, within those of the
    response."""

    def __init__(self, parsed: ParsedResponses, request_id: str, created: int) -> None:
        self._parsed = parsed
        self._request_id = request_id
        self._created = created
        self._reader = parsed.chat.reader()
        self._sequence_number = 0
        self._items: list[dict[str, Any]] = []
        self._num_calls = 0
        self._is_open = False  # The last item.
        self._scores: list[Any] = []  # Of tokens whose text has not been sent yet.
        self._finish_reason: str | None = None

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The response to outputs that are complete."""
        (choice,) = outputs[0].outputs
        delta = Delta(0, choice.text, choice.token_ids, choice.logprobs, choice.finish_reason)
        for _ in self.add(0, [delta]):
            pass
        *_, last = self.end(outputs)
        return last["response"]

    def without_output(self, status: str) -> dict[str, Any]:
        """The response while nothing of its output is known: queued, in_progress, cancelled."""
        return self._response(status, None)

    def begin(self) -> Iterator[ResponsesEvent]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress", None))

    def add(self, number: int, deltas: Sequence[Delta]) -> Iterator[ResponsesEvent]:
        """Events for new deltas; `number` is the index of the single prompt."""
        for delta in deltas:
            scores = self._parsed.chat.scores(delta)
            self._scores += scores["content"] if scores is not None else []
            pieces = self._reader.push(delta.text)
            if delta.finish_reason is not None:
                self._finish_reason = delta.finish_reason
                pieces += self._reader.finish()
            for piece in pieces:
                yield from self._gain(piece)

    def end(self, outputs: Sequence[RequestOutput]) -> Iterator[ResponsesEvent]:
        """The final events, once the output is complete."""
        cut_off = self._finish_reason != "stop"
        if not self._items:
            yield from self._begin(self._message())
        yield from self._end("incomplete" if cut_off else "completed")
        status = "incomplete" if cut_off else "completed"
        completed_at = None if cut_off else self._created + _duration_s(outputs[0].metrics)
        response = self._response(status, self._parsed.usage(outputs), completed_at)
        if not self._parsed.in_background:  # Else it was stored when it began.
            self._parsed.store(response)  # Before the client knows that there is one.
        yield self._event(f"response.{status}", response=response)

    def failed(self, reply: ErrorReply) -> Iterator[ResponsesEvent]:
        """The event of an error after the beginning."""
        yield self._event("response.failed", response=self.failure(reply))

    def failure(self, reply: ErrorReply) -> dict[str, Any]:
        """The response of an error after the beginning."""
        error = {"code": "server_error", "message": reply.message}
        return self._response("failed", None) | {"error": error}

    def _gain(self, piece: Piece) -> Iterator[ResponsesEvent]:
        match piece.kind:
            case "reasoning" if not self._parsed.chat.include_reasoning:
                pass
            case "reasoning":
                if not self._in("reasoning"):
                    yield from self._end("completed")
                    yield from self._begin(self._reasoning())
                yield self._grow("response.reasoning_text.delta", piece.text)
            case "content":
                if not self._in("message"):
                    yield from self._end("completed")
                    yield from self._begin(self._message())
                scores, self._scores = self._scores, []
                self._part["logprobs"] += scores
                yield self._grow("response.output_text.delta", piece.text, logprobs=scores)
            case "call":
                yield from self._end("completed")
                yield from self._begin(self._function_call(piece.text))
            case "arguments":
                self._items[-1]["arguments"] += piece.text
                kind = "response.function_call_arguments.delta"
                yield self._event(kind, **self._place, delta=piece.text)
            case "end":
                yield from self._end("completed")
            case "cut":
                yield from self._end("incomplete")

    def _in(self, kind: str) -> bool:
        return self._is_open and self._items[-1]["type"] == kind

    @property
    def _part(self) -> dict[str, Any]:
        return self._items[-1]["content"][0]

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _grow(self, kind: str, text: str, **more: Any) -> ResponsesEvent:
        """Add text to the open part."""
        self._part["text"] += text
        return self._event(kind, **self._place, content_index=0, delta=text, **more)

    def _begin(self, item: dict[str, Any]) -> Iterator[ResponsesEvent]:
        self._items.append(item)
        self._is_open = True
        shown = item | ({"content": []} if "content" in item else {})
        kind = "response.output_item.added"
        yield self._event(kind, output_index=len(self._items) - 1, item=shown)
        if "content" in item:
            kind = "response.content_part.added"
            yield self._event(kind, **self._place, content_index=0, part=dict(self._part))

    def _end(self, status: str) -> Iterator[ResponsesEvent]:
        """End the open item, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            kind, arguments = "response.function_call_arguments.done", item["arguments"]
            yield self._event(kind, **self._place, name=item["name"], arguments=arguments)
        else:
            part, place = self._part, self._place | {"content_index": 0}
            text = {"text": part["text"]}
            if item["type"] == "message":
                text["logprobs"] = part["logprobs"]
            yield self._event(f"response.{part['type']}.done", **place, **text)
            yield self._event("response.content_part.done", **place, part=part)
        index = len(self._items) - 1
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _message(self) -> dict[str, Any]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return self._item("message", "msg") | {"role": "assistant", "content": [part]}

    def _reasoning(self) -> dict[str, Any]:
        part = {"type": "reasoning_text", "text": ""}
        return self._item("reasoning", "rs") | {"summary": [], "content": [part]}

    def _function_call(self, name: str) -> dict[str, Any]:
        call = call_id(self._request_id, 0, self._num_calls)
        self._num_calls += 1
        return self._item("function_call", "fc") | {"call_id": call, "name": name, "arguments": ""}

    def _item(self, kind: str, prefix: str) -> dict[str, Any]:
        name = f"{prefix}_{self._request_id}_{len(self._items)}"
        return {"id": name, "type": kind, "status": "in_progress"}

    def _event(self, kind: str, **fields: Any) -> ResponsesEvent:
        event = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return event

    def _response(
        self, status: str, usage: dict[str, Any] | None, completed_at: int | None = None
    ) -> dict[str, Any]:
        too_long = status == "incomplete" and self._finish_reason == "length"
        return {
            "id": f"resp_{self._request_id}",
            "object": "response",
            "created_at": self._created,
            "completed_at": completed_at,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if too_long else None,
            "output": list(self._items) if status != "in_progress" else [],
            "usage": usage,
            **self._parsed.described,
        }
