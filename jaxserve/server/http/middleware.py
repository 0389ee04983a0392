"""Middleware: requests in progress, headers, API keys, and limits of request bodies."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import re
from collections import Counter
from collections.abc import Collection, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.protocol.errors import ErrorReply
from jaxserve.server.disconnect import ClientGoneError
from jaxserve.server.http.connections import ConnectionLimits
from jaxserve.server.preparation import LARGE_BYTES
from jaxserve.server.request_state import state_of
from jaxserve.server.responses import error_response

OPEN_PATHS = ("/health", "/livez", "/ping")
"""Routes that need no key, and are answered under any load."""

MAX_HEADER_BYTES = 1 << 16

MAX_JSON_PARTS, MAX_JSON_STRINGS, MAX_JSON_VALUES = 1 << 15, 1 << 18, 1 << 20
"""Lists and objects in a body, strings, and values in all: they take longer to check than their
bytes."""

_DROPPED_BYTES = 64 << 20
_JSON_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)

_UNAUTHORIZED = ErrorReply(
    401,
    "the Authorization header must be 'Bearer' and an API key of this server, or the header "
    "X-Api-Key must be one.",
    "authentication_error",
    code="invalid_api_key",
)


class RootPath:
    """Tells the application the path below which a proxy serves it, and removes that path from the
    request's if the proxy has left it there."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path.startswith(f"{self._root}/"):
            path = path.removeprefix(self._root)
        await self._app({**scope, "path": path, "root_path": self._root}, receive, send)


class HeaderChecks:
    """Refuses headers that are too large or ambiguous, and a Host header that names none of
    `allowed_hosts` if that is not None: a page of another site could otherwise use a server of its
    visitor's machine, by pointing its own name there."""

    def __init__(self, app: ASGIApp, allowed_hosts: Iterable[str] | None, has_keys: bool) -> None:
        self._app = app
        self._has_keys = has_keys
        self._allowed = None if allowed_hosts is None else {host.lower() for host in allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await _close_with(refusal, scope, receive, send)

    def _refusal(self, scope: Scope) -> ErrorReply | None:
        headers = scope["headers"]
        size = len(scope["raw_path"]) + len(scope["query_string"])
        if size + sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
            message = f"the header is larger than the limit of {MAX_HEADER_BYTES} bytes."
            return ErrorReply(431, message, "invalid_request_error", code="header_too_large")
        given = dict(headers)
        if b"content-length" in given and b"transfer-encoding" in given:
            message = "the header has Content-Length and Transfer-Encoding; send one of them."
            return ErrorReply(400, message, "invalid_request_error")
        host = given.get(b"host", b"").decode("latin-1").lower()
        if self._allowed is not None and scope["path"] not in OPEN_PATHS and not self._knows(host):
            other = "" if self._has_keys else ", or with --api-key-file"
            message = (
                f"this server does not answer to the host {host!r:.80}; start it with "
                f"--allowed-hosts and that name{other}."
            )
            return ErrorReply(403, message, "invalid_request_error", code="host_not_allowed")
        return None

    def _knows(self, host: str) -> bool:
        """Whether a Host header is absent, an address, localhost or an allowed name."""
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name in ("", "localhost") or name in self._allowed:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


class RequestLimits:
    """Refuses requests, except to `OPEN_PATHS`, while too many are in progress."""

    def __init__(self, app: ASGIApp, limits: ConnectionLimits) -> None:
        self._app = app
        self._limits = limits
        self._of_peer: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        peer = scope["client"][0] if scope["client"] else ""
        limits, of_peer = self._limits, self._of_peer[peer]
        full = self._of_peer.total() >= limits.max_connections or of_peer >= limits.max_of_peer
        if full and scope["path"] not in OPEN_PATHS:
            message = "too many requests are in progress; retry later."
            refusal = ErrorReply(503, message, "service_unavailable_error", None, "unavailable", 5)
            await _close_with(refusal, scope, receive, send)
            return
        self._of_peer[peer] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._of_peer -= Counter([peer])


async def _close_with(refusal: ErrorReply, scope: Scope, receive: Receive, send: Send) -> None:
    """Respond, and close the connection, since the rest of the request is not read."""
    answer = error_response(refusal, scope["path"])
    answer.headers["connection"] = "close"
    await answer(scope, receive, send)


class ApiKeys:
    """Rejects requests without a valid key, except to `open_paths`, and sets the tenant of all
    others: a digest of the key, the same on every server. Keys are compared in constant time."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], open_paths: Collection[str]) -> None:
        self._app = app
        self._open_paths = open_paths
        self._tenants = {b"Bearer " + key.encode(): tenant_of(key) for key in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        shown = (headers.get(b"authorization", b""), b"Bearer " + headers.get(b"x-api-key", b""))
        tenants = [
            tenant
            for header in shown
            for expected, tenant in self._tenants.items()
            if hmac.compare_digest(header, expected)
        ]
        if tenants:
            state_of(scope).tenant = tenants[0]
        if tenants or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
        else:
            answer = error_response(_UNAUTHORIZED, scope["path"])
            answer.headers["www-authenticate"] = "Bearer"
            await answer(scope, receive, send)


def tenant_of(key: str) -> str:
    """The tenant that requests with an API key belong to: a digest of the key."""
    return hashlib.blake2b(key.encode(), digest_size=16, person=b"jaxserve tenant").hexdigest()


class BodyLimit:
    """Reads request bodies before the routes run, up to a size and within a time limit."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._turns = _Turns()

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
            message = f"the body is larger than the limit of {self._max_bytes} bytes."
            if body is not None:
                if len(body) > LARGE_BYTES:
                    await self._turns.wait()
                if not _has_many_values(body):
                    await self._app(scope, _again(body, receive), send)
                    return
                message = (
                    f"the body has more than {MAX_JSON_PARTS} JSON lists and objects, "
                    f"{MAX_JSON_STRINGS} strings or {MAX_JSON_VALUES} values."
                )
            refusal = ErrorReply(413, message, "invalid_request_error", code="body_too_large")
        await _close_with(refusal, scope, receive, send)

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


def _has_many_values(body: bytes) -> bool:
    """Whether a body has more parts, strings or values than allowed, were it JSON."""

    def has_many(text: bytes) -> bool:
        parts = text.count(b"[") + text.count(b"{")
        return parts > MAX_JSON_PARTS or text.count(b",") > MAX_JSON_VALUES

    if body.count(b'"') - body.count(rb"\"") > 2 * MAX_JSON_STRINGS:
        return True
    return has_many(body) and has_many(_JSON_STRING.sub(b"", body))


class _Turns:
    """Lets large bodies into the application one at a time. It parses them in the event loop, so
    for as long as one has taken, others are served before the next."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def wait(self) -> None:
        """Wait for a turn; it is over once the caller waits for something else."""
        await self._turn.acquire()
        loop = asyncio.get_running_loop()
        begin = loop.time()
        loop.call_soon(lambda: loop.call_later(loop.time() - begin, self._turn.release))


def _again(body: bytes, receive: Receive) -> Receive:
    """A Receive that returns the body already read, then later messages."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return left.pop() if left else await receive()

    return next_message
