"""The response of `/v1/messages`: whole, or streamed in events; and its errors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any

from jaxserve.core.requests.outputs import Delta, RequestOutput
from jaxserve.protocol.chat.reply import ParsedBlocks, call_id
from jaxserve.protocol.errors import ErrorReply
from jaxserve.protocol.parsing.tool_calls import Piece

MessagesEvent = dict[str, Any]

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(reply: ErrorReply) -> dict[str, Any]:
    """The body of an error response, in Anthropic's format."""
    default = "api_error" if reply.status >= 500 else "invalid_request_error"
    error = {"type": _ERROR_TYPES.get(reply.status, default), "message": reply.message}
    return {"type": "error", "error": error}


@dataclasses.dataclass(frozen=True)
class ParsedMessages(ParsedBlocks):
    """A chat request, answered in content blocks."""

    def response(
        self, outputs: Sequence[RequestOutput], request_id: str, created: int
    ) -> dict[str, Any]:
        """The response body."""
        chunks = self.chunks(request_id, created)
        (choice,) = outputs[0].outputs
        reasons = choice.finish_reason, choice.stop_reason
        for _ in chunks.add(0, [Delta(0, choice.text, choice.token_ids, None, *reasons)]):
            pass
        return chunks.message(outputs)

    def chunks(self, request_id: str, created: int) -> MessagesChunks:
        """The response in streamed events."""
        return MessagesChunks(self, request_id)

    def usage(self, outputs: Sequence[RequestOutput]) -> dict[str, int]:
        """Anthropic's counts, of which `input_tokens` leaves out what came from the cache."""
        counted = self.chat.usage(outputs)
        cached = counted.get("prompt_tokens_details", {}).get("cached_tokens", 0)
        return {
            "input_tokens": counted["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": counted["completion_tokens"],
        }


class MessagesChunks:
    """Events of a streamed response: those of one content block after the other, within those of
    the message."""

    def __init__(self, parsed: ParsedMessages, request_id: str) -> None:
        self._parsed = parsed
        self._request_id = request_id
        self._reader = parsed.chat.reader()
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False  # The last block.
        self._arguments = ""
        self._reasons: dict[str, str | None] = {"stop_reason": None, "stop_sequence": None}

    def begin(self) -> Iterator[MessagesEvent]:
        (prompt,) = self._parsed.prompts
        # What comes from the cache is not known yet.
        usage = {
            "input_tokens": len(prompt.token_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }
        yield {"type": "message_start", "message": self._message([], usage)}

    def add(self, number: int, deltas: Sequence[Delta]) -> Iterator[MessagesEvent]:
        """Events for new deltas; `number` is the index of the single prompt."""
        for delta in deltas:
            pieces = self._reader.push(delta.text)
            if delta.finish_reason is not None:
                pieces += self._reader.finish()
            for piece in pieces:
                yield from self._gain(piece)
            if delta.finish_reason is not None:
                yield from self._end()
                self._stop(delta)

    def end(self, outputs: Sequence[RequestOutput]) -> Iterator[MessagesEvent]:
        """The final events, once the output is complete."""
        usage = self._parsed.usage(outputs)
        yield {"type": "message_delta", "delta": self._reasons, "usage": usage}
        yield {"type": "message_stop"}

    def failed(self, reply: ErrorReply) -> Iterator[MessagesEvent]:
        """The event of an error after the beginning."""
        yield error_body(reply)

    def message(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """The whole message. A call that was cut off is left out."""
        blocks = [block for block in self._blocks if block.get("input", True) is not None]
        return self._message(blocks, self._parsed.usage(outputs))

    def _message(self, blocks: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._parsed.chat.model.name,
            "content": blocks,
            **self._reasons,
            "usage": usage,
        }

    def _stop(self, delta: Delta) -> None:
        called = any(block["type"] == "tool_use" for block in self._blocks)
        if delta.finish_reason != "stop":
            reason = "max_tokens"
        elif isinstance(delta.stop_reason, str):
            reason = "stop_sequence"
            self._reasons["stop_sequence"] = delta.stop_reason
        else:
            reason = "tool_use" if called else "end_turn"
        self._reasons["stop_reason"] = reason

    def _gain(self, piece: Piece) -> Iterator[MessagesEvent]:
        match piece.kind:
            case "reasoning" if not self._parsed.chat.include_reasoning:
                pass
            case "reasoning":
                if not self._in("thinking"):
                    yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
                self._blocks[-1]["thinking"] += piece.text
                yield self._delta(type="thinking_delta", thinking=piece.text)
            case "content":
                if not self._in("text"):
                    yield from self._begin({"type": "text", "text": ""})
                self._blocks[-1]["text"] += piece.text
                yield self._delta(type="text_delta", text=piece.text)
            case "call":
                number = sum(block["type"] == "tool_use" for block in self._blocks)
                name = call_id(self._request_id, 0, number)
                block = {"type": "tool_use", "id": name, "name": piece.text, "input": {}}
                yield from self._begin(block)
                self._arguments = ""
            case "arguments":
                self._arguments += piece.text
                yield self._delta(type="input_json_delta", partial_json=piece.text)
            case "end" | "cut":
                yield from self._end()

    def _in(self, kind: str) -> bool:
        return self._is_open and self._blocks[-1]["type"] == kind

    def _begin(self, block: dict[str, Any]) -> Iterator[MessagesEvent]:
        yield from self._end()
        self._blocks.append(block)
        self._is_open = True
        index = len(self._blocks) - 1
        yield {"type": "content_block_start", "index": index, "content_block": dict(block)}

    def _delta(self, **delta: str) -> MessagesEvent:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _end(self) -> Iterator[MessagesEvent]:
        """End the open block, if there is one."""
        if not self._is_open:
            return
        self._is_open = False
        block = self._blocks[-1]
        if block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
        elif block["type"] == "thinking":
            yield self._delta(type="signature_delta", signature="")
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object of a call's arguments; None if it was cut off, or is wrong."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
