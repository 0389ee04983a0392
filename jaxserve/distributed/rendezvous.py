"""Check before JAX's runtime starts that all hosts are present, once each, with equal versions.

JAX's coordination service ends the process, without a Python exception, if its port is taken, if it
cannot be reached or if a host is missing. So the hosts first connect to host 0 on the coordinator's
port: each sends its identity, host 0 compares them, and all receive the same verdict. Then host 0
releases the port to JAX.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import socket
import time
from typing import Any, NamedTuple

from jaxserve.core.errors import DistributedError

_LINE_BYTES = 65536
_RETRY_S = 0.2
_HELLO_S = 5.0


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


def call(address: Address, me: Participant, timeout_s: float) -> None:
    """Host 0: wait for all other hosts, and send them the verdict.

    Raises DistributedError, on all hosts, if one is missing after `timeout_s`, joins twice, or
    disagrees; and immediately if the port is in use.
    """
    deadline = time.monotonic() + timeout_s
    present: dict[int, socket.socket] = {}
    refused: list[socket.socket] = []
    fault = None
    with address.listen() as server:
        while fault is None and len(present) < me.num_hosts - 1:
            server.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                fault = _missing(present, me.num_hosts, timeout_s)
                break
            them = _hello(connection)
            if them is None:  # Not one of the hosts.
                connection.close()
                continue
            fault = me.differs(them)
            if fault is None and (them.host == 0 or them.host in present):
                fault = f"two processes joined as host {them.host}; number each host once."
            if fault is None:
                present[them.host] = connection
            else:
                refused.append(connection)
    for connection in [*present.values(), *refused]:
        _dismiss(connection, fault)
    if fault is not None:
        raise DistributedError(fault)


def answer(address: Address, me: Participant, timeout_s: float) -> None:
    """Every other host: connect to host 0, and wait for the verdict.

    Raises DistributedError if the job cannot start, or host 0 is not reached within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    with _reach(address, me, deadline, timeout_s) as connection:
        # Host 0 is already listening, so its own timeout ends before this one.
        connection.settimeout(timeout_s + _HELLO_S)
        try:
            connection.sendall(json.dumps(dataclasses.asdict(me)).encode() + b"\n")
            verdict = _read_line(connection)
        except (OSError, ValueError):
            verdict = None
    if not isinstance(verdict, dict) or "fault" not in verdict:
        raise DistributedError(
            f"{address} accepted host {me.host} but did not respond as host 0 does. Host 0 may "
            "have failed (see its log), or another program may use this port."
        )
    if verdict["fault"] is not None:
        raise DistributedError(verdict["fault"])


def _missing(present: dict[int, socket.socket], num_hosts: int, timeout_s: float) -> str:
    missing = [host for host in range(1, num_hosts) if host not in present]
    shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
    return (
        f"{len(present) + 1} of {num_hosts} hosts joined within {timeout_s:g} s; "
        f"missing: {shown}. See their logs, or increase timeout_s."
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


def _hello(connection: socket.socket) -> Participant | None:
    """The identity sent by the peer; None if it is not a host."""
    connection.settimeout(_HELLO_S)
    try:
        said = _read_line(connection)
        return Participant(int(said["host"]), int(said["num_hosts"]), dict(said["versions"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _dismiss(connection: socket.socket, fault: str | None) -> None:
    """Send the verdict and wait for the peer to close first: the side that closes first keeps its
    port in TIME_WAIT, and JAX needs this port."""
    with connection:
        try:
            connection.sendall(json.dumps({"fault": fault}).encode() + b"\n")
            connection.recv(1)
        except OSError:
            pass  # The peer is gone, which JAX or the launcher will report.


def _read_line(connection: socket.socket) -> Any:
    """Read one line of JSON. Raises ValueError for anything else."""
    with connection.makefile("rb") as stream:
        return json.loads(stream.readline(_LINE_BYTES))
