"""Strangers at the rendezvous of a job's hosts."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import PATIENCE_S

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from jaxserve.distributed import rendezvous
from jaxserve.distributed.rendezvous import Address, Participant

pytestmark = pytest.mark.attack

SECRET = "ours"
STRANGERS = 400


def host(number: int) -> Participant:
    return Participant(number, 2, {"version": "1"})


@pytest.fixture
def address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Address("127.0.0.1", server.getsockname()[1])


def started(address, timeout_s=PATIENCE_S) -> tuple[threading.Thread, list]:
    """Host 0, in a thread, and how it ended."""
    ended = []

    def run() -> None:
        try:
            ended.append(rendezvous.wait_for_hosts(address, host(0), timeout_s, SECRET))
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ended


def connected(address) -> socket.socket:
    give_up = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection(address, timeout=PATIENCE_S)
        except OSError:
            assert time.monotonic() < give_up
            time.sleep(0.01)


def test_hosts_meet_among_strangers_of_every_kind(address):
    """Silent ones, slow ones, long ones, and those that have what hypothesis makes up."""
    thread, ended = started(address)
    with contextlib.ExitStack() as stack:
        for number in range(STRANGERS):
            raw = stack.enter_context(connected(address))
            with contextlib.suppress(OSError):
                raw.sendall((b"", b"0", b"0" * 20_000, b"\n" * 100)[number % 4])

        @settings(max_examples=300, deadline=None, database=None)
        @given(line=st.binary(max_size=200) | st.text('0123456789abcdef {}":\n', max_size=200))
        def hostile(line):
            with connected(address) as raw, contextlib.suppress(OSError):
                raw.sendall((line if isinstance(line, bytes) else line.encode()) + b"\n")

        hostile()
        # If each stranger made it wait for its turn, that would be half an hour.
        rendezvous.join_host_0(address, host(1), PATIENCE_S, SECRET)
    thread.join(PATIENCE_S)
    assert ended == [None]
