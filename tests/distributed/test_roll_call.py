"""Hosts that meet before JAX's runtime starts: real sockets, one thread a host."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.errors import DistributedError
from jaxserve.distributed.rendezvous import Address, Participant, answer, call

VERSIONS = {"version of jaxserve": "1", "version of JAX": "2"}


def free_address() -> Address:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Address("127.0.0.1", server.getsockname()[1])


def meet(
    attendees: Sequence[Participant], address: Address | None = None, timeout_s: float = 20
) -> list[str | None]:
    """What each was told: None, or the error."""
    address = address or free_address()
    told: list[str | None] = [None] * len(attendees)

    def attend(place: int, me: Participant) -> None:
        try:
            (call if me.host == 0 else answer)(address, me, timeout_s)
        except DistributedError as error:
            told[place] = str(error)

    threads = [threading.Thread(target=attend, args=pair) for pair in enumerate(attendees)]
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
    told = meet(hosts(4, 0, 2), timeout_s=0.5)
    assert told[0] == told[1]
    assert "2 of 4 hosts joined within 0.5 s; missing: 1, 3." in told[0]


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
        call(address, hosts(2)[0], 5)
    assert meet(hosts(2, 1), address) == [None]
    first.join(timeout=30)
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
        begin = time.monotonic()
        with pytest.raises(DistributedError, match=f"port {address.port} of 127.0.0.1"):
            call(address, hosts(2)[0], 60)
        assert time.monotonic() - begin < 5


def test_a_coordinator_out_of_reach_is_refused_in_time():
    address = free_address()
    begin = time.monotonic()
    with pytest.raises(DistributedError) as caught:
        answer(address, hosts(2)[1], 1)
    assert time.monotonic() - begin < 5
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
            answer(address, hosts(2)[1], 5)
        greeter.join(timeout=10)


@settings(max_examples=20, deadline=None)
@given(said=st.binary(max_size=40))
def test_who_is_no_host_is_ignored(said):
    address = free_address()
    told: list[str | None] = []
    zero = threading.Thread(target=lambda: told.extend(meet(hosts(2, 0), address)))
    zero.start()
    with connected(address) as stranger:
        stranger.sendall(said + b"\n")
    assert meet(hosts(2, 1), address) == [None]
    zero.join(timeout=30)
    assert told == [None]


def connected(address: Address) -> socket.socket:
    """A connection, as soon as somebody listens."""
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection(address, timeout=5)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_job_of_several_machines_listens_on_all_addresses():
    address = Address("node-1.cluster", free_address().port)
    with address.listen():
        socket.create_connection(("127.0.0.1", address.port), timeout=5).close()


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
