"""Middleware: API keys, and size and time limits of request bodies."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.protocol.errors import ErrorReply
from jaxserve.server.disconnect import ClientGoneError
from jaxserve.server.request_state import state_of
from jaxserve.server.responses import error_response

OPEN_PATH = "/health"
"""The only route that needs no key."""

_DROPPED_BYTES = 64 << 20

_UNAUTHORIZED = ErrorReply(
    401,
    "the Authorization header must be 'Bearer' and an API key of this server.",
    "authentication_error",
    code="invalid_api_key",
)


class ApiKeys:
    """Rejects requests without a valid key, and sets the tenant of all others: a digest of the key,
    the same on every server. Keys are compared in constant time."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._tenants = {b"Bearer " + key.encode(): _tenant(key) for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shown = dict(scope["headers"]).get(b"authorization", b"")
        tenants = [
            tenant
            for expected, tenant in self._tenants.items()
            if hmac.compare_digest(shown, expected)
        ]
        if tenants:
            (state_of(scope).tenant,) = tenants
        if tenants or scope["path"] == OPEN_PATH:
            await self._app(scope, receive, send)
        else:
            answer = error_response(_UNAUTHORIZED)
            answer.headers["www-authenticate"] = "Bearer"
            await answer(scope, receive, send)


def _tenant(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16, person=b"jaxserve tenant").hexdigest()


class BodyLimit:
    """Reads request bodies before the routes run, up to a size and within a time limit."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await self._read(scope, receive)
        except TimeoutError:
            message = f"the body was not received within {self._timeout_s:g} s."
            refusal = ErrorReply(408, message, "invalid_request_error")
        except ClientGoneError:
            state_of(scope).client_gone = True
            return
        else:
            if body is not None:
                await self._app(scope, _again(body, receive), send)
                return
            message = f"the body is larger than the limit of {self._max_bytes} bytes."
            refusal = ErrorReply(413, message, "invalid_request_error", code="body_too_large")
        answer = error_response(refusal)
        answer.headers["connection"] = "close"  # the rest of the body is not read
        await answer(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None if it is too large.

        An oversized body is drained up to a limit, since clients send all of it before they read.
        """
        most = self._max_bytes + _DROPPED_BYTES
        if int(dict(scope["headers"]).get(b"content-length", b"0")) > most:
            return None
        body, size = bytearray(), 0
        while size <= most:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part = message.get("body", b"")
            size += len(part)
            if size <= self._max_bytes:
                body += part
            if not message.get("more_body"):
                return bytes(body) if size <= self._max_bytes else None
        return None


def _again(body: bytes, receive: Receive) -> Receive:
    """A Receive that returns the body already read, then later messages."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return left.pop() if left else await receive()

    return next_message
