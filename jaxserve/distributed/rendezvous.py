"""Check before JAX's runtime starts that all hosts are present, once each, with equal versions.

JAX's coordination service ends the process, without a Python exception, if its port is taken, if it
cannot be reached or if a host is missing. So the hosts first connect to host 0 on the coordinator's
port: each sends its identity, host 0 compares them, and all receive the same verdict. Then host 0
releases the port to JAX.

Every message is a line of JSON behind its HMAC-SHA256 under the job's secret and a nonce that the
receiver drew, so that neither side takes another program, or a recorded line, for a host. Host 0
reads all connections at once, each for a limited time: one that is slow or sends anything else
delays no host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import ipaddress
import json
import re
import secrets
import selectors
import socket
import time
from typing import Any, NamedTuple

from jaxserve.core.errors import DistributedError

SECRET_VARIABLE = "JAXSERVE_JOB_SECRET"
"""Environment variable with the job's secret, where the launcher cannot write to stdin."""

_LINE_BYTES = 1 << 14
_RETRY_S = 0.2
_HELLO_S = 5.0
# Connections without a hello, in addition to one per host; beyond that the oldest is closed.
_MAX_UNVERIFIED = 256


class Address(NamedTuple):
    """Host 0's address: a name or an IP address, and a TCP port."""

    name: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse `name:port` or `[ipv6]:port`. Raises DistributedError for anything else."""
        name, colon, port = text.rpartition(":")
        if not (colon and name and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise DistributedError(
                f"the coordinator is {text!r}; give host 0's address as name:port, "
                "with a port from 1 to 65535."
            )
        return cls(name.removeprefix("[").removesuffix("]"), int(port))

    def __str__(self) -> str:
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"

    @property
    def bind(self) -> str:
        """The address host 0 listens on: loopback if the coordinator address is, so that a local
        job is not reachable from outside; else all interfaces."""
        return str(self) if self._loopback() else f"[::]:{self.port}"

    def _loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.name).is_loopback
        except ValueError:
            return self.name == "localhost"

    def listen(self) -> socket.socket:
        """Raises DistributedError if the port is in use."""
        try:
            if self._loopback():
                family = socket.AF_INET6 if ":" in self.name else socket.AF_INET
                return socket.create_server((self.name, self.port), family=family)
            if socket.has_dualstack_ipv6():
                return socket.create_server(
                    ("", self.port), family=socket.AF_INET6, dualstack_ipv6=True
                )
            return socket.create_server(("", self.port))
        except OSError as error:
            raise DistributedError(
                f"host 0 cannot listen on port {self.port} of {self.name}: {error.strerror}. "
                "Give the coordinator another port, or stop the program that uses this one."
            ) from error


@dataclasses.dataclass(frozen=True)
class Participant:
    """The identity that a host sends.

    Attributes:
        host: its index.
        num_hosts: number of hosts it was started with.
        versions: versions that must be equal on all hosts, by name.
    """

    host: int
    num_hosts: int
    versions: dict[str, str]

    def differs(self, other: Participant) -> str | None:
        """How `other` conflicts with this host, or None."""
        facts = {"number of hosts": self.num_hosts} | self.versions
        others = {"number of hosts": other.num_hosts} | other.versions
        for name in facts:
            if facts[name] != others.get(name):
                return (
                    f"the {name} is {facts[name]} on host {self.host} and {others.get(name)} on "
                    f"host {other.host}; all hosts must agree."
                )
        if not 0 <= other.host < self.num_hosts:
            return (
                f"host {other.host} joined, but {self.num_hosts} hosts are numbered from 0 to "
                f"{self.num_hosts - 1}."
            )
        return None


def wait_for_hosts(address: Address, me: Participant, timeout_s: float, secret: str = "") -> None:
    """Host 0: wait for all other hosts, and send them the verdict.

    Connections that do not prove within 5 s that they know `secret` are closed, and change nothing.
    Raises DistributedError, on all hosts, if one is missing after `timeout_s`, joins twice, or
    disagrees; and immediately if the port is in use.
    """
    deadline = time.monotonic() + timeout_s
    present: dict[int, _Verified] = {}
    conflicting: list[_Verified] = []
    fault = None
    with (
        address.listen() as server,
        contextlib.closing(_Listener(server, me.num_hosts, secret)) as listener,
    ):
        while fault is None and len(present) < me.num_hosts - 1:
            verified = listener.next_host(deadline)
            if verified is None:
                fault = _missing(set(present), me.num_hosts, timeout_s, listener.refused)
                break
            them = verified.host
            fault = me.differs(them)
            if fault is None and (them.host == 0 or them.host in present):
                fault = f"two processes joined as host {them.host}; number each host once."
            if fault is None:
                present[them.host] = verified
            else:
                conflicting.append(verified)
    for verified in [*present.values(), *conflicting]:
        _send_verdict(verified, fault, secret)
    if fault is not None:
        raise DistributedError(fault)


def join_host_0(address: Address, me: Participant, timeout_s: float, secret: str = "") -> None:
    """Every other host: connect to host 0, and wait for the verdict.

    Raises DistributedError if the job cannot start, host 0 is not reached within `timeout_s`, or
    what answers there does not know `secret`.
    """
    deadline = time.monotonic() + timeout_s
    with _reach(address, me, deadline, timeout_s) as connection:
        # Host 0 is already listening, so its own timeout ends before this one.
        until = time.monotonic() + timeout_s + _HELLO_S
        nonce = _new_nonce()
        try:
            challenge = _read_line(connection, until).decode("ascii")
            if not _is_nonce(challenge):
                raise ValueError(f"{challenge!r} is not a nonce")
            hello = dataclasses.asdict(me) | {"nonce": nonce}
            connection.sendall(_sealed(secret, "hello", challenge, hello))
            verdict = _opened(secret, "verdict", nonce, _read_line(connection, until))
        except (OSError, ValueError):
            verdict = None
    if not isinstance(verdict, dict) or not isinstance(verdict.get("fault", 0), str | None):
        raise DistributedError(
            f"{address} accepted host {me.host} but did not respond as host 0 does. Host 0 may "
            "have failed (see its log) or have another job secret, or another program may use "
            "this port."
        )
    if verdict["fault"] is not None:
        raise DistributedError(verdict["fault"])


@dataclasses.dataclass(frozen=True)
class _Verified:
    """A connection that knows the job's secret, and the nonce that its verdict is sealed with."""

    connection: socket.socket
    host: Participant
    nonce: str


@dataclasses.dataclass(frozen=True)
class _Pending:
    """A connection that was sent `challenge` and has until `deadline` to answer it."""

    connection: socket.socket
    challenge: str
    deadline: float
    received: bytearray


class _Listener:
    """Reads the hellos of all connections at once."""

    def __init__(self, server: socket.socket, num_hosts: int, secret: str) -> None:
        self._server, self._secret = server, secret
        self._most = num_hosts + _MAX_UNVERIFIED
        self._pending: dict[socket.socket, _Pending] = {}  # oldest first
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)
        self.refused = 0
        """Number of connections that were closed because they sent no valid hello."""

    def next_host(self, deadline: float) -> _Verified | None:
        """The next host that arrives; None if there is none before `deadline`."""
        while (now := time.monotonic()) < deadline:
            oldest = next(iter(self._pending.values()), None)
            until = deadline if oldest is None else min(deadline, oldest.deadline)
            for key, _ in self._selector.select(max(until - now, 0.0)):
                if key.fileobj is self._server:
                    self._admit()
                elif (verified := self._receive(key.fileobj)) is not None:
                    return verified
            now = time.monotonic()
            for pending in [p for p in self._pending.values() if p.deadline <= now]:
                self._refuse(pending.connection)
        return None

    def close(self) -> None:
        for connection in self._pending:
            connection.close()
        self._selector.close()

    def _admit(self) -> None:
        challenge = _new_nonce()
        try:
            connection, _ = self._server.accept()
        except OSError:
            return  # The peer is gone.
        connection.setblocking(False)
        deadline = time.monotonic() + _HELLO_S
        self._pending[connection] = _Pending(connection, challenge, deadline, bytearray())
        self._selector.register(connection, selectors.EVENT_READ)
        try:
            connection.send(challenge.encode() + b"\n")
        except OSError:
            self._refuse(connection)
        if len(self._pending) > self._most:
            self._refuse(next(iter(self._pending)))

    def _receive(self, connection: socket.socket) -> _Verified | None:
        """The host, once its whole hello has arrived."""
        pending = self._pending.get(connection)
        if pending is None:  # closed in this round
            return None
        try:
            data = connection.recv(_LINE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        pending.received.extend(data)
        line, end, _ = pending.received.partition(b"\n")
        if data and not end and len(line) < _LINE_BYTES:
            return None
        said = _opened(self._secret, "hello", pending.challenge, bytes(line)) if end else None
        verified = _verified(connection, said)
        if verified is None:
            self._refuse(connection)
        else:
            self._forget(connection)
        return verified

    def _refuse(self, connection: socket.socket) -> None:
        self._forget(connection)
        self.refused += 1
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        del self._pending[connection]
        self._selector.unregister(connection)


def _verified(connection: socket.socket, said: Any) -> _Verified | None:
    """The host that sent the hello `said`; None if it is not one."""
    match said:
        case {"host": int(host), "num_hosts": int(count), "versions": dict(versions), "nonce": n}:
            if _is_nonce(n) and all(isinstance(v, str) for v in versions.values()):
                return _Verified(connection, Participant(host, count, versions), n)
    return None


def _missing(present: set[int], num_hosts: int, timeout_s: float, refused: int) -> str:
    missing = [host for host in range(1, num_hosts) if host not in present]
    shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
    refusals = f" Connections closed without this job's secret: {refused}." if refused else ""
    return (
        f"{len(present) + 1} of {num_hosts} hosts joined within {timeout_s:g} s; "
        f"missing: {shown}. See their logs, or increase timeout_s.{refusals}"
    )


def _reach(address: Address, me: Participant, deadline: float, timeout_s: float) -> socket.socket:
    while True:
        left = deadline - time.monotonic()
        try:
            connection = socket.create_connection(address, timeout=max(min(left, _HELLO_S), 0.001))
            # TCP can connect a port to itself while nothing listens on it.
            if connection.getsockname() != connection.getpeername():
                return connection
            connection.close()
        except OSError as error:
            if left <= _RETRY_S:
                raise DistributedError(
                    f"host {me.host} could not reach the coordinator at {address} within "
                    f"{timeout_s:g} s: {error.strerror or error}. Is host 0 running, and is the "
                    "port open?"
                ) from error
        time.sleep(_RETRY_S)


def _send_verdict(verified: _Verified, fault: str | None, secret: str) -> None:
    """Send the verdict and wait for the peer to close first: the side that closes first keeps its
    port in TIME_WAIT, and JAX needs this port."""
    with verified.connection as connection:
        connection.settimeout(_HELLO_S)
        try:
            connection.sendall(_sealed(secret, "verdict", verified.nonce, {"fault": fault}))
            connection.recv(1)
        except OSError:
            pass  # The peer is gone, which JAX or the launcher will report.


def _new_nonce() -> str:
    return secrets.token_hex(16)


def _is_nonce(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value) is not None


def _mac(secret: str, kind: str, nonce: str, body: bytes) -> bytes:
    message = f"{kind} {nonce} ".encode() + body
    key = secret.encode(errors="surrogatepass")
    return hmac.digest(key, message, "sha256").hex().encode()


def _sealed(secret: str, kind: str, nonce: str, content: dict[str, Any]) -> bytes:
    """A line that only who knows `secret` can write, in answer to `nonce`."""
    body = json.dumps(content).encode()
    return _mac(secret, kind, nonce, body) + b" " + body + b"\n"


def _opened(secret: str, kind: str, nonce: str, line: bytes) -> Any:
    """The JSON of a sealed line; None for anything else. Nothing is parsed before the check."""
    mac, _, body = line.partition(b" ")
    if not hmac.compare_digest(mac, _mac(secret, kind, nonce, body)):
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    """One line, without its end. Raises ValueError for a longer one, OSError at `deadline` (of
    time.monotonic) and when the peer closes."""
    received = b""
    while b"\n" not in received:
        if len(received) >= _LINE_BYTES:
            raise ValueError(f"a line has more than {_LINE_BYTES} bytes")
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        data = connection.recv(_LINE_BYTES)
        if not data:
            raise ConnectionResetError("the peer closed the connection")
        received += data
    return received.partition(b"\n")[0]
