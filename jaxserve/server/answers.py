"""Answers of the endpoints that generate: JSON when all is there, or server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from typing import Any

from starlette.background import BackgroundTask
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from jaxserve.outputs import RequestOutput
from jaxserve.protocol.endpoints import Call
from jaxserve.protocol.errors import ErrorReply, check_generated, reply_to
from jaxserve.server.disconnect import ClientGoneError, unless_hung_up
from jaxserve.server.notes import RequestNotes, notes_of
from jaxserve.server.service import Service

WRITE_TIMEOUT_S = 120.0
"""How long a client may take none of a stream; then it counts as gone."""

_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would keep events until there are many
]


def to_json(body: Any) -> bytes:
    """JSON in UTF-8. Half a surrogate pair, which UTF-8 cannot say, is spelled as JSON can."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "backslashreplace")


class JsonAnswer(JSONResponse):
    """A JSON body."""

    def render(self, content: Any) -> bytes:
        return to_json(content)


def error_answer(reply: ErrorReply) -> JsonAnswer:
    after = reply.retry_after_s
    headers = None if after is None else {"retry-after": str(after)}
    return JsonAnswer(reply.body, reply.status, headers)


class GeneratedAnswer(Response):
    """The answer to a call, which the engine works on while it is being sent.

    A client that hangs up has its requests aborted. One that reads slowly gets larger pieces.
    """

    def __init__(self, service: Service, call: Call) -> None:
        self.status_code = 200
        self.background: BackgroundTask | None = None
        self._service = service
        self._call = call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        notes = notes_of(scope)
        work = self._stream if self._call.stream else self._whole
        try:
            await unless_hung_up(receive, work(notes, send))
        except ClientGoneError:
            notes.client_gone = True

    async def _whole(self, notes: RequestNotes, send: Send) -> None:
        call, created = self._call, int(time.time())
        notes.outputs = outputs = [None] * len(call.prompts)
        async with self._service.follow(call, notes.request_id, notes.tenant) as updates:
            async for number, update in updates:
                if isinstance(update, RequestOutput):
                    outputs[number] = update
        check_generated(outputs)
        body = to_json(call.response(outputs, notes.request_id, created))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, notes: RequestNotes, send: Send) -> None:
        call = self._call
        chunks = call.chunks(notes.request_id, int(time.time()))
        notes.outputs = outputs = [None] * len(call.prompts)
        async with self._service.follow(call, notes.request_id, notes.tenant) as updates:
            await send(
                {"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)}
            )
            await _send_events(send, chunks.begin())
            try:
                async for number, update in updates:
                    if isinstance(update, RequestOutput):
                        outputs[number] = update
                    else:
                        await _send_events(send, chunks.add(number, update))
                check_generated(outputs)
                await _send_events(send, chunks.end(outputs))
            except ClientGoneError:
                raise
            except Exception as error:  # The status has been sent: only an event can tell.
                notes.error = error
                await _send_events(send, [reply_to(error).body])
        await send({"type": "http.response.body", "body": _DONE})


async def _send_events(send: Send, chunks: Iterable[dict[str, Any]]) -> None:
    body = b"".join(b"data: " + to_json(chunk) + b"\n\n" for chunk in chunks)
    if body:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except TimeoutError:
            raise ClientGoneError from None
