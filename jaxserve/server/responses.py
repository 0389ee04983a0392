"""Responses of the endpoints that run the model: JSON when complete, or server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from typing import Any

from starlette.background import BackgroundTask
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from jaxserve.core.errors import JaxserveError, RequestError
from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.protocol.endpoints import ParsedGeneration, ParsedRequest
from jaxserve.protocol.errors import ErrorReply, check_generated, renamed, reply_to
from jaxserve.protocol.messages_api.reply import error_body
from jaxserve.server.disconnect import ClientGoneError, cancel_on_disconnect
from jaxserve.server.request_state import RequestState, state_of
from jaxserve.server.service import Service

WRITE_TIMEOUT_S = 120.0
"""How long a client may stall a stream before it counts as disconnected."""

_DONE = b"data: [DONE]\n\n"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer events
]


def to_json(body: Any) -> bytes:
    """JSON in UTF-8. Lone surrogates, which UTF-8 cannot encode, become JSON escapes."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.encode("utf-8", "backslashreplace")


class JsonResponse(JSONResponse):
    """A JSON body."""

    def render(self, content: Any) -> bytes:
        return to_json(content)


def error_response(reply: ErrorReply, path: str) -> JsonResponse:
    """The response of an error, in the format of the API that the path is of."""
    after = reply.retry_after_s
    headers = None if after is None else {"retry-after": str(after)}
    body = error_body(reply) if "/v1/messages" in path else reply.body
    return JsonResponse(body, reply.status, headers)


def warning_of(parsed: ParsedRequest) -> dict[str, str]:
    """The header that says what the response leaves out. 199 is a warning of any kind."""
    if parsed.ignored_tools is None:
        return {}
    return {"warning": f'199 jaxserve "tools are ignored: {parsed.ignored_tools}"'}


class GeneratedResponse(Response):
    """The response to a request that runs the model, sent while the engine runs it.

    If the client disconnects, its requests are aborted. A slow client gets larger chunks.
    """

    def __init__(self, service: Service, parsed: ParsedRequest) -> None:
        self.status_code = 200
        self.background: BackgroundTask | None = None
        self._service = service
        self._parsed = parsed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_state = state_of(scope)
        self._load_format = dict(scope["headers"]).get(b"endpoint-load-metrics-format", b"")
        work = self._stream if self._parsed.stream else self._whole
        try:
            await cancel_on_disconnect(receive, work(request_state, send))
        except ClientGoneError:
            request_state.client_gone = True
        except RequestError as error:
            raise renamed(error, self._parsed.names) from None

    async def _whole(self, request_state: RequestState, send: Send) -> None:
        parsed, created = self._parsed, int(time.time())
        request_state.outputs = outputs = [None] * len(parsed.prompts)
        async with self._service.submit(
            parsed, request_state.request_id, request_state.tenant
        ) as updates:
            async for number, update in updates:
                if isinstance(update, RequestOutput):
                    outputs[number] = update
        check_generated(outputs)
        body = to_json(parsed.response(outputs, request_state.request_id, created))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self._warning(),
            *await self._load(),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, request_state: RequestState, send: Send) -> None:
        parsed: ParsedGeneration = self._parsed
        chunks = parsed.chunks(request_state.request_id, int(time.time()))
        request_state.outputs = outputs = [None] * len(parsed.prompts)
        async with self._service.submit(
            parsed, request_state.request_id, request_state.tenant
        ) as updates:
            headers = [*_STREAM_HEADERS, *self._warning()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            named = parsed.named_events
            await _send_events(send, chunks.begin(), named)
            try:
                async for number, update in updates:
                    if isinstance(update, RequestOutput):
                        outputs[number] = update
                    else:
                        await _send_events(send, chunks.add(number, update), named)
                check_generated(outputs)
                await _send_events(send, chunks.end(outputs), named)
            except ClientGoneError:
                raise
            except Exception as error:  # The status is sent; report the error as an event.
                request_state.error = error
                await _send_events(send, chunks.failed(reply_to(error)), named)
        await send({"type": "http.response.body", "body": b"" if named else _DONE})

    async def _load(self) -> list[tuple[bytes, bytes]]:
        """The header by which a router asked for the load of the engine (ORCA), as vLLM writes it.
        A stream has none: it would be that of its beginning. Nor has the answer of an engine that
        has ended since."""
        form = self._load_format.upper()
        if form not in (b"TEXT", b"JSON"):
            return []
        try:
            load = await self._service.load()
        except JaxserveError:
            return []
        if form == b"JSON":
            said = to_json({"named_metrics": load})
        else:
            said = ", ".join(f"named_metrics.{name}={load[name]}" for name in load).encode()
        return [(b"endpoint-load-metrics", form + b" " + said)]

    def _warning(self) -> list[tuple[bytes, bytes]]:
        named = warning_of(self._parsed).items()
        return [(name.encode(), value.encode()) for name, value in named]


async def _send_events(send: Send, chunks: Iterable[dict[str, Any]], named: bool) -> None:
    body = b"".join(_event(chunk, named) for chunk in chunks)
    if body:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await send({"type": "http.response.body", "body": body, "more_body": True})
        except TimeoutError:
            raise ClientGoneError from None


def _event(chunk: dict[str, Any], named: bool) -> bytes:
    name = b"event: " + chunk["type"].encode() + b"\n" if named else b""
    return name + b"data: " + to_json(chunk) + b"\n\n"
