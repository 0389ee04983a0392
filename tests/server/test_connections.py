"""Connections without requests: how long they stay, and how many there may be."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from patience import PATIENCE_S

from jaxserve.cli.serve import Serve
from jaxserve.core.errors import OverloadedError
from jaxserve.protocol.errors import UnavailableError
from jaxserve.server import app as apps
from jaxserve.server import preparation
from jaxserve.server.http import connections
from jaxserve.server.http.connections import ConnectionLimits
from jaxserve.server.http.listening import listen
from jaxserve.server.preparation import PreparationPool
from jaxserve.server.run import http_server
from jaxserve.server.service import Service

HALF = b"GET /health HTTP/1.1\r\nHost: local"
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
WAITS_FOR_BODY = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"


def served(scenario, keys=(), limits=None) -> None:
    """Run a scenario with the port of a server that has no engine, so /health says "starting"."""

    async def run() -> None:
        settings = apps.AppSettings(keys, 1 << 20, log_requests=False)
        limited = limits or ConnectionLimits(100)
        app = apps.create_app(Service(["tiny"], 8), settings, limited)
        with listen("127.0.0.1", 0) as listener:
            server = http_server(app, limited)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                async with contextlib.AsyncExitStack() as stack:
                    port = listener.getsockname()[1]
                    await scenario(lambda data, host=None: connect(stack, port, data, host))
            finally:
                server.should_exit = True
                await serving

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


async def connect(stack, port, data, host):
    local = None if host is None else (host, 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=local)
    stack.callback(writer.close)
    writer.write(data)
    return reader, writer


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return head + await reader.readexactly(length)


async def closed(reader: asyncio.StreamReader, within_s: float = PATIENCE_S) -> bool:
    """Whether the server closes the connection and sends nothing more."""
    try:
        return await asyncio.wait_for(reader.read(), within_s) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def test_small_packets_are_not_delayed():
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP, "asyncio sets TCP_NODELAY for no other"


def test_a_header_that_does_not_end_closes_its_connection(monkeypatch):
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 1.0)

    async def scenario(connect):
        readers = [(await connect(data))[0] for data in (b"", b"G", HALF)]
        again, writer = await connect(HEALTH)  # a second header on a kept connection
        assert (await answer(again)).startswith(b"HTTP/1.1 503")
        writer.write(HALF)
        reading, body = await connect(WAITS_FOR_BODY)  # this has another limit
        assert all([await closed(reader) for reader in (*readers, again)])
        assert not await closed(reading, 0.5)
        body.write(b'{"a": 1}\n')
        assert (await answer(reading)).startswith(b"HTTP/1.1 400")

    served(scenario)


def test_the_rest_of_a_refused_body_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(connections, "HEADER_TIMEOUT_S", 1.0)

    async def scenario(connect):
        reader, writer = await connect(WAITS_FOR_BODY)
        assert (await answer(reader)).startswith(b"HTTP/1.1 401")
        writer.write(b" ")
        assert await closed(reader)

    served(scenario, keys=("key",))


def test_many_half_open_connections_block_no_client():
    async def scenario(connect):
        flood = [await connect(HALF) for _ in range(30)]
        others = [await connect(HALF, host="127.0.0.3") for _ in range(3)]
        for host in (None, "127.0.0.2"):
            reader, _ = await connect(HEALTH, host)
            assert b'"starting"' in await answer(reader)
        assert all([await closed(reader) for reader, _ in flood[:24]]), "the first ones go"
        assert not await closed(flood[-1][0], 0.1)
        assert not await closed(others[-1][0], 0.1)

    served(scenario, limits=ConnectionLimits(8))


def test_requests_in_progress_are_bounded_and_health_is_answered(monkeypatch):
    monkeypatch.setattr(connections, "RESERVED", 4)

    limits = ConnectionLimits(6)

    async def scenario(connect):
        reading = [await connect(WAITS_FOR_BODY) for _ in range(4)]
        while len(limits._open) < 4 or limits._waiting:  # Until all four have been read.
            await asyncio.sleep(0)
        refused, _ = await connect(WAITS_FOR_BODY)
        text = await answer(refused)
        assert text.startswith(b"HTTP/1.1 503") and b"too many requests" in text
        assert await closed(refused)
        health, _ = await connect(HEALTH)
        assert b'"starting"' in await answer(health)
        other, writer = await connect(WAITS_FOR_BODY, host="127.0.0.2")
        writer.write(b'{"a": 1}\n')
        assert (await answer(other)).startswith(b"HTTP/1.1 400"), "another peer has its share"
        for reader, body in reading:
            body.write(b'{"a": 1}\n')
            assert (await answer(reader)).startswith(b"HTTP/1.1 400"), "none was cut off"

    served(scenario, limits=limits)


@pytest.mark.parametrize(
    ("lines", "statuses"),
    [
        (b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", (b"400",)),
        (b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n0\r\n\r\n", (b"400",)),
        (b"X: " + b"a" * 70_000 + b"\r\n\r\n", (b"400", b"431")),
        (b"X: " + b"a" * 60_000 + b"\r\n\r\n", (b"503",)),
    ],
)
def test_headers_that_are_ambiguous_or_too_large(lines, statuses):
    async def scenario(connect):
        reader, _ = await connect(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + lines)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        assert head.split()[1] in statuses
        assert (b"connection: close" in head.lower()) == (b"503" not in statuses)

    served(scenario)


def test_a_header_too_large_is_refused_though_it_comes_in_one_piece():
    """h11 looks at its limit only while a header is incomplete."""

    async def ask() -> int:
        async def receive():
            return {"type": "http.request"}

        async def send(message):
            sent.append(message)

        sent: list[dict] = []
        app = apps.create_app(Service(["tiny"], 8), apps.AppSettings((), 1 << 20, False))
        scope = {"type": "http", "method": "GET", "path": "/version", "raw_path": b"/version"}
        scope |= {"query_string": b"", "client": None, "headers": [(b"x", b"a" * 70_000)]}
        await app(scope, receive, send)
        return sent[0]["status"]

    assert asyncio.run(ask()) == 431


@pytest.mark.parametrize(
    ("settings", "has_keys", "hosts"),
    [
        ({}, False, ()),
        ({"host": "::1", "allowed_hosts": ("a",)}, False, ("a",)),
        ({}, True, None),
        ({"allowed_hosts": ("a",)}, True, ("a",)),
        ({"host": "0.0.0.0"}, False, ()),
        ({"host": "0.0.0.0"}, True, None),
        ({"uds": Path("socket")}, False, None),
        ({"host": "0.0.0.0", "allowed_hosts": ("a",)}, False, ("a",)),
    ],
)
def test_which_hosts_are_accepted(settings, has_keys, hosts):
    assert Serve(**settings)._hosts(has_keys) == hosts


def test_workers_refuse_what_is_too_much_or_too_late(monkeypatch):
    async def scenario() -> None:
        end = threading.Event()
        pool = PreparationPool(1)
        assert await pool.run(1, pow, 2, 3) == 8
        monkeypatch.setattr(preparation, "DEADLINE_S", 0.2)
        first = asyncio.create_task(pool.run(2, end.wait, PATIENCE_S))
        second = asyncio.create_task(pool.run(2, pow, 2, 3))
        await asyncio.sleep(0)  # Both have begun, and neither is late yet.
        with pytest.raises(OverloadedError, match="2 requests are being prepared"):
            await pool.run(2, pow, 2, 3)
        for late in (first, second):
            with pytest.raises(OverloadedError, match=r"within 0\.2 s"):
                await late
        assert pool.busy, "what runs cannot be stopped"
        third = asyncio.create_task(pool.run(9, pow, 2, 3))
        await asyncio.sleep(0)
        pool.close()
        with pytest.raises(UnavailableError, match="another server"):
            await third
        end.set()
        while pool.busy:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_S))


def test_as_many_files_may_be_open_as_the_system_allows():
    """In a process of its own, whose limits cannot be raised again."""
    code = """
import resource
from jaxserve.server.http.connections import ConnectionLimits
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2000))
limits = ConnectionLimits.of_system()
print(limits.max_connections, limits.max_of_peer, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert run.stdout.split() == ["1424", "1068", "2000"]


@pytest.mark.parametrize(
    ("body", "too_many"),
    [
        (b"[" * 32_769, True),
        (b'[{}, "a", ' * 16_385, True),
        (b'["' + b"a" * 200_000, False),
        (b"[" + b"1," * 500_000, False),
        (b"[" + b'"a",' * 270_000, True),
        (b'["' + rb"\"," * 500_000, False),
        (b"[" + b"1," * 1_050_000, True),
        (b'["' + b"1," * 1_050_000 + b'"', False),
        (b"[" * 32_768, False),
        (b'{"a": "' + b"[{" * 100_000 + b'"}', False),
        (b'{"a": "' + rb"\"[\\[\"{" * 30_000 + b'", "b": "[[["}', False),
    ],
    ids=range(11),
)
def test_a_body_of_too_many_values_is_refused_before_it_is_parsed(body, too_many):
    """Brackets in strings count for nothing."""

    async def ask() -> int:
        async def receive():
            return {"type": "http.request", "body": body}

        async def send(message):
            sent.append(message)

        sent: list[dict] = []
        app = apps.create_app(Service(["tiny"], 8), apps.AppSettings((), 3 << 20, False))
        path = "/v1/completions"
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
        headers = [(b"content-type", b"application/json")]
        scope |= {"query_string": b"", "client": None, "headers": headers}
        await app(scope, receive, send)
        return sent[0]["status"]

    assert asyncio.run(ask()) == (413 if too_many else 400)
