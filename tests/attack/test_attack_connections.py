"""Connections that send no request, half of one, or what is none."""

from __future__ import annotations

import contextlib
import resource
import socket
import time

import pytest
from patience import PATIENCE_S

pytestmark = pytest.mark.attack

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer attacker\r\n"
    b"Content-Type: application/json\r\n"
)
HALF_OPEN = 1000
"""More than one address may have: three quarters of 1,224, which are what MAX_FILES allow."""


def raw_answer(server, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as raw:
        raw.sendall(request)
        received = b""
        with contextlib.suppress(ConnectionError):
            while part := raw.recv(1 << 16):
                received += part
        return received


def test_a_kept_connection_answers_without_delay(attacked):
    waits = []
    for _ in range(11):
        begin = time.perf_counter()
        assert attacked.client.get("/health").status_code == 200
        waits.append(time.perf_counter() - begin)
    assert min(waits[-5:]) < 0.03, "delayed acknowledgements take 40 ms"


def test_health_may_be_asked_by_head(attacked):
    response = attacked.client.head("/health")
    assert (response.status_code, response.content) == (200, b"")


def test_thousands_of_half_open_connections_block_no_client(attacked, bystander):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < HALF_OPEN + 500:
        pytest.skip("this process may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, HALF_OPEN + 500), hard))
    try:
        with contextlib.ExitStack() as stack:
            begin = time.monotonic()
            for _ in range(HALF_OPEN):
                address = "127.0.0.1", attacked.port
                half = stack.enter_context(socket.create_connection(address, timeout=PATIENCE_S))
                half.sendall(b"GET /health HTTP/1.1\r\nHost: local")
            bystander.check()
            assert time.monotonic() - begin < 9.5, "too slow to have met the limit"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_names_of_other_hosts_are_refused(attacked):
    for host, status in (
        ("inside.example", 200),
        ("INSIDE.example:8000", 200),
        ("localhost:1", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example:80", 403),
    ):
        response = attacked.client.get("/v1/models", headers={"host": host})
        assert response.status_code == status, host
    assert "--allowed-hosts" in response.json()["error"]["message"]
    probe = attacked.client.get("/health", headers={"host": "10.0.0.1.nip.example"})
    assert probe.status_code == 200


def test_what_is_not_http_is_one_line_in_the_log(attacked):
    """Of a client without a key, after it has its 401, or in its stead."""
    before = len(attacked.text().splitlines())
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert raw_answer(attacked, head + b"no chunk\r\n").startswith(b"HTTP/1.1 400 ")
    with socket.create_connection(("127.0.0.1", attacked.port), timeout=PATIENCE_S) as raw:
        raw.sendall(head)
        assert raw.recv(1 << 16).startswith(b"HTTP/1.1 401 ")
        raw.sendall(b"no chunk\r\n")
        with contextlib.suppress(ConnectionError):
            while raw.recv(1 << 16):
                pass
    raw_answer(attacked, b"\x16\x03\x01 hello\r\n\r\n")
    lines = attacked.text().splitlines()[before:]
    assert len(lines) == 3, lines
    assert all("Invalid HTTP request" in line for line in lines), lines


NOT_HTTP = [
    b"",
    b"\r\n" * 1000,
    b"\x00" * 5000,
    b"\xff\xfe" * 5000,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"GET\r\n\r\n",
    b"GET /health\r\n\r\n",
    b"GET /health HTTP/9.9\r\n\r\n",
    b"GET  /health  HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET /health HTTP/1.1\r\n Host: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost : a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n",
    b"GET /health HTTP/1.1\nHost: localhost\n\n",
    b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /%00%ff%2e%2e/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://evil.example/health HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    b"GET * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"M-SEARCH /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    HEALTH + b"X: y\r\n" * 20_000 + b"\r\n",
    HEALTH + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    HEALTH + b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n\r\n",
    HEALTH + b"Connection: close\r\nX-Request-Id: a\xc3\xa9\r\n\r\n",
    POST + b"Content-Length: -1\r\n\r\n{}",
    POST + b"Content-Length: 99999999999999999999\r\n\r\n{}",
    POST + b"Content-Length: +2\r\n\r\n{}",
    POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} ",
    POST + b"Content-Length: 2, 2\r\n\r\n{}",
    POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: gzip\r\n\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}",
    POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n{}\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\n2;" + b"x" * 70_000 + b"\r\n{}\r\n0\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: y\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    POST + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08\x00",
    POST + b"Content-Length: 2\r\n\r\n{}GET /nowhere HTTP/1.1\r\n\r\n",
    POST + b"Expect: 200-maybe\r\nContent-Length: 2\r\n\r\n{}",
]


@pytest.mark.parametrize("data", NOT_HTTP, ids=range(len(NOT_HTTP)))
def test_any_bytes_have_a_refusal_or_none(attacked, data):
    """The client then closes its side; the server closes its own, after answers that are HTTP."""
    with socket.create_connection(("127.0.0.1", attacked.port), timeout=PATIENCE_S) as raw:
        received = b""
        with contextlib.suppress(ConnectionError):
            raw.sendall(data)
            raw.shutdown(socket.SHUT_WR)
            while part := raw.recv(1 << 16):
                received += part
    statuses = {
        int(line.split()[1]) for line in received.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")
    }
    assert bool(statuses) == bool(received)
    assert all(status == 200 or 400 <= status < 500 for status in statuses), received[:300]


def test_slow_headers_and_bodies_delay_no_other_client(attacked, bystander):
    """Fifty of each at a byte a tenth of a second: the headers are cut off in ten seconds."""
    with contextlib.ExitStack() as stack:
        lines = [
            (stack.enter_context(socket.create_connection(("127.0.0.1", attacked.port))), line)
            for line in (HEALTH * 20, POST + b"Content-Length: 100000\r\n\r\n" + b" " * 1000)
            for _ in range(50)
        ]
        for raw, line in lines[50:]:
            raw.sendall(line[:200])
        begin, place = time.monotonic(), 0
        while (now := time.monotonic()) < begin + 11.5:
            for number, (raw, line) in enumerate(lines):
                with contextlib.suppress(OSError):
                    at = place + 200 * (number >= 50)
                    raw.sendall(line[at : at + 1])
            place += 1
            time.sleep(max(0.0, now + 0.1 - time.monotonic()))
        for number, (raw, _) in enumerate(lines):
            raw.settimeout(0.01 if number >= 50 else PATIENCE_S)
            try:
                over = raw.recv(1) == b""
            except TimeoutError:
                over = False
            except OSError:
                over = True
            assert over == (number < 50), number
        bystander.check()


def test_a_thousand_requests_in_one_piece(attacked):
    """Their answers are not read until all are sent."""
    with socket.create_connection(("127.0.0.1", attacked.port), timeout=PATIENCE_S) as raw:
        raw.sendall((HEALTH + b"\r\n") * 999 + HEALTH + b"Connection: close\r\n\r\n")
        received = b""
        while part := raw.recv(1 << 16):
            received += part
    assert received.count(b"HTTP/1.1 200") == 1000
