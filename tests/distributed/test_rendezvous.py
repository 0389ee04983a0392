"""Hosts that meet before JAX's runtime starts: real sockets, one thread a host."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S

from jaxserve.core.errors import DistributedError
from jaxserve.distributed import rendezvous
from jaxserve.distributed.rendezvous import Address, Participant, join_host_0, wait_for_hosts
from jaxserve.distributed.runtime import join

VERSIONS = {"version of jaxserve": "1", "version of JAX": "2"}


def free_address() -> Address:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Address("127.0.0.1", server.getsockname()[1])


def meet(
    participants: Sequence[Participant],
    address: Address | None = None,
    timeout_s: float = PATIENCE_S,
    secret: str = "",
) -> list[str | None]:
    """What each was told: None, or the error."""
    address = address or free_address()
    told: list[str | None] = [None] * len(participants)

    def take_part(place: int, me: Participant) -> None:
        try:
            (wait_for_hosts if me.host == 0 else join_host_0)(address, me, timeout_s, secret)
        except DistributedError as error:
            told[place] = str(error)

    threads = [threading.Thread(target=take_part, args=pair) for pair in enumerate(participants)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=timeout_s + 10)
        assert not thread.is_alive()
    return told


def hosts(count: int, *numbers: int, versions: dict[str, str] = VERSIONS) -> list[Participant]:
    return [Participant(number, count, versions) for number in numbers or range(count)]


@settings(max_examples=8, deadline=None)
@given(order=st.integers(1, 8).flatmap(lambda count: st.permutations(range(count))))
def test_hosts_meet_in_any_order_and_leave_the_port_free(order):
    address = free_address()
    for _ in range(2):
        assert meet(hosts(len(order), *order), address) == [None] * len(order)


def test_a_host_that_is_missing_is_named_to_all():
    told = meet(hosts(4, 0, 2), timeout_s=3)
    assert told[0] == told[1]
    assert "2 of 4 hosts joined within 3 s; missing: 1, 3." in told[0]


def test_a_host_that_comes_twice_is_refused():
    told = meet(hosts(3, 0, 1, 1))
    assert told[0] == told[1] == told[2]
    assert "two processes joined as host 1" in told[0]


def test_a_second_host_0_is_refused_and_the_first_goes_on():
    address = free_address()
    told: list[str | None] = []
    first = threading.Thread(target=lambda: told.extend(meet(hosts(2, 0), address)))
    first.start()
    connected(address).close()
    with pytest.raises(DistributedError, match="cannot listen on port"):
        wait_for_hosts(address, hosts(2)[0], 5)
    assert meet(hosts(2, 1), address) == [None]
    first.join(timeout=PATIENCE_S)
    assert told == [None]


def test_hosts_of_different_versions_are_refused_with_both():
    other = hosts(2, 1, versions=VERSIONS | {"version of JAX": "3"})
    told = meet([*hosts(2, 0), *other])
    assert told[0] == told[1]
    assert "the version of JAX is 2 on host 0 and 3 on host 1" in told[0]


def test_hosts_that_disagree_on_their_number_are_refused_with_both():
    told = meet([*hosts(2, 0), *hosts(3, 1)])
    assert told[0] == told[1]
    assert "the number of hosts is 2 on host 0 and 3 on host 1" in told[0]


def test_a_port_that_is_taken_is_refused_at_once():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1])
        with pytest.raises(DistributedError, match=f"port {address.port} of 127.0.0.1"):
            wait_for_hosts(address, hosts(2)[0], 3600)


def test_a_coordinator_out_of_reach_is_refused_in_time():
    address = free_address()
    with pytest.raises(DistributedError) as caught:
        join_host_0(address, hosts(2)[1], 1)
    assert f"host 1 could not reach the coordinator at {address} within 1 s" in str(caught.value)


def test_another_program_on_the_port_is_not_taken_for_host_0():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1])

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"220 ready\n")

        greeter = threading.Thread(target=greet)
        greeter.start()
        with pytest.raises(DistributedError, match="another program may use this port"):
            join_host_0(address, hosts(2)[1], 5)
        greeter.join(timeout=PATIENCE_S)


@settings(max_examples=20, deadline=None)
@given(said=st.binary(max_size=40))
def test_a_client_that_is_no_host_is_ignored(said):
    address = free_address()
    told: list[str | None] = []
    zero = threading.Thread(target=lambda: told.extend(meet(hosts(2, 0), address)))
    zero.start()
    with connected(address) as stranger:
        stranger.sendall(said + b"\n")
    assert meet(hosts(2, 1), address) == [None]
    zero.join(timeout=PATIENCE_S)
    assert told == [None]


def connected(address: Address) -> socket.socket:
    """A connection, as soon as a process listens."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection(address, timeout=PATIENCE_S)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_job_of_several_machines_listens_on_all_addresses():
    address = Address("node-1.cluster", free_address().port)
    with address.listen():
        socket.create_connection(("127.0.0.1", address.port), timeout=PATIENCE_S).close()


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:0", "host:65536", "host:x"])
def test_an_address_without_a_name_or_port_is_refused(text):
    with pytest.raises(DistributedError, match="name:port"):
        Address.parse(text)


@pytest.mark.parametrize(
    ("text", "bind"),
    [
        ("127.0.0.1:80", "127.0.0.1:80"),
        ("[::1]:80", "[::1]:80"),
        ("localhost:80", "localhost:80"),
        ("10.0.0.1:80", "[::]:80"),
        ("node-1.cluster:80", "[::]:80"),
    ],
)
def test_a_job_within_one_machine_listens_there_only(text, bind):
    assert str(Address.parse(text)) == text
    assert Address.parse(text).bind == bind


SECRET = "s3cret"
HELLO = {"host": 1, "num_hosts": 2, "versions": VERSIONS, "nonce": "0" * 32}


def sealed(secret: str, kind: str, nonce: str, body: str) -> bytes:
    """A line of the protocol, as a program that was written from its description would send it."""
    mac = hmac.new(secret.encode(), f"{kind} {nonce} {body}".encode(), "sha256").hexdigest()
    return f"{mac} {body}\n".encode()


def challenged(address: Address) -> tuple[socket.socket, str]:
    """A new connection, and the nonce that host 0 sent."""
    connection = connected(address)
    connection.settimeout(PATIENCE_S)
    return connection, connection.recv(1000).decode().strip()


@contextlib.contextmanager
def host_0(address: Address, secret: str = SECRET, timeout_s: float = PATIENCE_S):
    """Host 0 of two; what it is told is in the list when the block has ended."""
    told: list[str | None] = []
    zero = threading.Thread(
        target=lambda: told.extend(meet(hosts(2, 0), address, timeout_s, secret))
    )
    zero.start()
    yield told
    zero.join(timeout=PATIENCE_S)
    assert not zero.is_alive()


def closed(connection: socket.socket) -> bool:
    """Whether the other side closes this connection."""
    connection.settimeout(PATIENCE_S)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


DEEP = "[" * 8000
HOSTILE_BODIES = [
    json.dumps(HELLO).replace('"host": 1', '"host": 1e999'),
    json.dumps(HELLO).replace('"host": 1', '"host": ' + "9" * 5000),
    json.dumps(HELLO).replace('"host": 1', f'"host": {DEEP}'),
    json.dumps(HELLO | {"nonce": "\ud800"}),
    json.dumps(HELLO | {"versions": {"a": [1]}}),
    json.dumps(HELLO | {"host": "1"}),
    DEEP,
    "null",
    "",
]


@pytest.mark.parametrize("secret", ["", SECRET])
def test_hostile_hellos_are_closed_and_change_nothing(secret):
    """Without a secret any process can seal a line, so it is not even the seal that holds."""
    address = free_address()
    with host_0(address, secret) as told:
        for body in HOSTILE_BODIES:
            connection, nonce = challenged(address)
            with connection:
                connection.sendall(sealed("", "hello", nonce, body))
                assert closed(connection), body
        assert meet(hosts(2, 1), address, secret=secret) == [None]
    assert told == [None]


@pytest.mark.parametrize("versions", [VERSIONS, {"version of JAX": "none"}])
def test_an_impostor_is_not_taken_for_a_host_and_cannot_end_the_job(versions):
    address = free_address()
    with host_0(address) as told:
        hello = json.dumps(HELLO | {"versions": versions})
        for guess in ("", "guess"):
            connection, nonce = challenged(address)
            with connection:
                connection.sendall(sealed(guess, "hello", nonce, hello))
                assert closed(connection)
        assert meet(hosts(2, 1), address, secret=SECRET) == [None]
    assert told == [None]


def test_the_line_of_a_host_cannot_be_sent_again():
    address = free_address()
    with host_0(address) as told:
        connection, nonce = challenged(address)
        recorded = sealed(SECRET, "hello", nonce, json.dumps(HELLO))
        connection.close()
        connection, _ = challenged(address)
        with connection:
            connection.sendall(recorded)
            assert closed(connection)
        assert meet(hosts(2, 1), address, secret=SECRET) == [None]
    assert told == [None]


def test_a_host_with_another_secret_is_told_and_counted():
    address = free_address()
    with host_0(address, timeout_s=3) as told:
        (said,) = meet(hosts(2, 1), address, secret="another")
        assert "have another job secret" in said
    assert "missing: 1." in told[0]
    assert "Connections closed without this job's secret: 1." in told[0]


def test_join_takes_the_secret_of_the_environment(monkeypatch):
    monkeypatch.setenv(rendezvous.SECRET_VARIABLE, SECRET)
    address = free_address()
    told: list[str | None] = []
    other = threading.Thread(
        target=lambda: told.extend(meet(hosts(2, 1), address, secret=SECRET)), daemon=True
    )
    other.start()
    # Host 1 got as far as the comparison of versions, which are made up here.
    with pytest.raises(DistributedError, match="the version of jaxserve is"):
        join(str(address), 2, 0, timeout_s=PATIENCE_S)
    other.join(timeout=PATIENCE_S)
    assert "the version of jaxserve is" in told[0]


def test_many_slow_connections_do_not_delay_a_host(monkeypatch):
    monkeypatch.setattr(rendezvous, "_HELLO_S", 3600.0)
    address = free_address()
    with host_0(address) as told, contextlib.ExitStack() as slow:
        for _ in range(300):
            slow.enter_context(connected(address)).sendall(b"0")
        assert meet(hosts(2, 1), address, secret=SECRET) == [None]  # before any of them is closed
    assert told == [None]


@pytest.mark.parametrize("data", [b"0" * (1 << 20), b"0"])
def test_a_hello_has_a_limit_and_a_deadline(monkeypatch, data):
    monkeypatch.setattr(rendezvous, "_HELLO_S", 2.0)
    address = free_address()
    with host_0(address) as told:
        connection, _ = challenged(address)
        with connection:
            with contextlib.suppress(ConnectionError):  # closed before all of it was sent
                connection.sendall(data)
            assert closed(connection)
        assert meet(hosts(2, 1), address, secret=SECRET) == [None]
    assert told == [None]


@pytest.mark.parametrize(
    "reply",
    [
        sealed("", "verdict", "0" * 32, '{"fault": null}'),
        sealed(SECRET, "verdict", "0" * 32, '{"fault": null}'),  # for another host's nonce
        b"0" * (1 << 20),
        DEEP.encode() + b"\n",
        b"",
    ],
)
def test_an_impostor_is_not_taken_for_host_0(reply):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1])

        def pretend() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(PATIENCE_S)
                connection.sendall(b"0" * 32 + b"\n")
                connection.recv(1 << 16)
                connection.sendall(reply)

        impostor = threading.Thread(target=pretend)
        impostor.start()
        with pytest.raises(DistributedError, match="did not respond as host 0 does"):
            join_host_0(address, hosts(2)[1], 5, SECRET)
        impostor.join(timeout=PATIENCE_S)
        assert not impostor.is_alive()


def test_a_host_0_that_sends_a_byte_at_a_time_is_given_up(monkeypatch):
    monkeypatch.setattr(rendezvous, "_HELLO_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1])

        def drip() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                while True:
                    connection.sendall(b"0")
                    time.sleep(0.1)

        dripper = threading.Thread(target=drip)
        dripper.start()
        with pytest.raises(DistributedError, match="did not respond as host 0 does"):
            join_host_0(address, hosts(2)[1], 0.5, SECRET)
        dripper.join(timeout=PATIENCE_S)
        assert not dripper.is_alive()
