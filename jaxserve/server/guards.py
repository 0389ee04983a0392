"""What stands before the routes: the API keys, and the size of bodies."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.protocol.errors import ErrorReply
from jaxserve.server.answers import error_answer
from jaxserve.server.disconnect import ClientGoneError
from jaxserve.server.notes import notes_of

OPEN_PATH = "/health"
"""The one route that needs no key."""

_DROPPED_BYTES = 64 << 20

_UNAUTHORIZED = ErrorReply(
    401,
    "the Authorization header must be 'Bearer' and an API key of this server.",
    "authentication_error",
    code="invalid_api_key",
)


class ApiKeys:
    """Refuses requests that show none of the keys, and notes the tenant of all others: a digest of
    the key, the same on every server. Comparing takes constant time."""

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
            (notes_of(scope).tenant,) = tenants
        if tenants or scope["path"] == OPEN_PATH:
            await self._app(scope, receive, send)
        else:
            answer = error_answer(_UNAUTHORIZED)
            answer.headers["www-authenticate"] = "Bearer"
            await answer(scope, receive, send)


def _tenant(key: str) -> str:
    return hashlib.blake2b(key.encode(), digest_size=16, person=b"jaxserve tenant").hexdigest()


class BodyLimit:
    """Reads bodies, so that routes find all of them there, up to a size and within a time."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await self._read(scope, receive)
        except TimeoutError:
            message = f"the body did not come within {self._timeout_s:g} s."
            refusal = ErrorReply(408, message, "invalid_request_error")
        except ClientGoneError:
            notes_of(scope).client_gone = True
            return
        else:
            if body is not None:
                await self._app(scope, _again(body, receive), send)
                return
            message = f"the body is larger than the {self._max_bytes} bytes that are allowed."
            refusal = ErrorReply(413, message, "invalid_request_error", code="body_too_large")
        answer = error_answer(refusal)
        answer.headers["connection"] = "close"  # what is left of the body is not read
        await answer(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None if it is too large.

        Of such a one the rest is read too, if it is not huge: clients send all before they listen.
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
    """Gives the body that has been read, then what comes after it."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return left.pop() if left else await receive()

    return next_message
