"""HTTP connections: how many there may be, and how long they may take to send a request."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from typing import Any, Self

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_TIMEOUT_S = 10.0
"""How long a client may take to send a request's header."""

MAX_CONNECTIONS = 4096

RESERVED = 64
"""Connections beyond the limits that may ask for /health; other requests are refused on them."""

_OTHER_FILES = 512


class ConnectionLimits:
    """Limits of open connections, in all and by the address of their peer, and their count.

    When there are too many, the one that has waited longest for a request is closed: it is
    half-open, or kept alive for a request that may never come.

    Attributes:
        max_connections: how many connections there may be, and requests in progress.
        max_of_peer: how many of them one address may have, three quarters; the rest are for
            others.
    """

    def __init__(self, max_connections: int = MAX_CONNECTIONS) -> None:
        self.max_connections = max_connections
        self.max_of_peer = max(1, max_connections * 3 // 4)
        self._open: set[HttpConnection] = set()
        self._of_peer: Counter[str] = Counter()
        self._waiting: dict[HttpConnection, None] = {}  # the longest first

    @classmethod
    def of_system(cls) -> Self:
        """As many as the system lets this process open, whose limit on open files is raised as far
        as need be, at most `MAX_CONNECTIONS`."""
        needed = MAX_CONNECTIONS + RESERVED + _OTHER_FILES
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < needed:
            soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            needed = soft
        return cls(max(1, needed - RESERVED - _OTHER_FILES))

    def add(self, connection: HttpConnection) -> None:
        """Count a new connection, and close one if there are too many. That is the new one only if
        requests are in progress on all others and on the reserved ones."""
        if self._excess(connection.peer) >= 0:
            of_peer = self._of_peer[connection.peer] >= self.max_of_peer
            waiting = (c for c in self._waiting if not of_peer or c.peer == connection.peer)
            if (longest := next(waiting, None)) is not None:
                longest.close()
        if self._excess(connection.peer) >= RESERVED:
            connection.close()
            return
        self._open.add(connection)
        self._of_peer[connection.peer] += 1

    def set_waiting(self, connection: HttpConnection, waits: bool) -> None:
        """Note whether a connection waits for a request."""
        self._waiting.pop(connection, None)
        if waits and connection in self._open:
            self._waiting[connection] = None

    def remove(self, connection: HttpConnection) -> None:
        """Idempotent."""
        if connection in self._open:
            self._open.remove(connection)
            self._waiting.pop(connection, None)
            self._of_peer -= Counter([connection.peer])

    def _excess(self, peer: str) -> int:
        """How many connections there are above the limits; 0 if a new one would be the first."""
        return max(len(self._open) - self.max_connections, self._of_peer[peer] - self.max_of_peer)


class HttpConnection(H11Protocol):
    """uvicorn's HTTP connection, with a time limit for headers, and counted by ConnectionLimits."""

    def __init__(self, limits: ConnectionLimits, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._limits = limits
        self._header_due: asyncio.TimerHandle | None = None

    @property
    def peer(self) -> str:
        """The client's address."""
        return self.client[0] if self.client else ""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._limits.add(self)
        self._await_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_header()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_header()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP. The response in progress, if any, ends: its application is told
        that the client has disconnected."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def close(self) -> None:
        self._forget()
        self.transport.close()

    def _await_header(self) -> None:
        """Start or stop the clock of the next request's header. It also runs while the rest of a
        body is ignored, of a request that has its response."""
        answered = self.cycle is not None and self.cycle.response_complete
        waits = self.conn.their_state is h11.IDLE or answered
        if self.transport.is_closing() or waits == (self._header_due is not None):
            return
        self._limits.set_waiting(self, waits)
        if waits:
            self._header_due = self.loop.call_later(HEADER_TIMEOUT_S, self.close)
        else:
            self._stop_clock()

    def _forget(self) -> None:
        self._limits.remove(self)
        self._stop_clock()

    def _stop_clock(self) -> None:
        if self._header_due is not None:
            self._header_due.cancel()
            self._header_due = None
