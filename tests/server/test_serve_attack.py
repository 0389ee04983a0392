"""Clients that mean harm: none of them keeps another one waiting, or the server from its end."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from server_process import ServerProcess

pytestmark = pytest.mark.interfaces

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
KEY = {"authorization": "Bearer s3cret"}
SHORT = {"prompt": "hi", "max_tokens": 3, "temperature": 0}
SLOW = (
    '{% if messages[0].content == "slow" %}{% for i in range(99999) %}{% for j in range(99999) %}'
    "{% endfor %}{% endfor %}{% endif %}"
)


@pytest.fixture(scope="module")
def attacked(chat_model, tmp_path_factory):
    """A server with a key, whose chat template takes minutes for the message "slow"."""
    directory = tmp_path_factory.mktemp("attacked")
    model = shutil.copytree(chat_model, directory / "m")
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = SLOW + config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "key").write_text("s3cret\n")
    args = ("--max-queued-requests=12", "--shutdown-timeout=1", "--allowed-hosts=inside.example")
    server = ServerProcess(model, directory / "log", f"--api-key-file={directory / 'key'}", *args)
    server.client.headers.update(KEY)
    yield server.wait_ready()
    server.process.kill()
    server.process.wait()
    server.client.close()


@contextlib.contextmanager
def others_are_served(server):
    """Other clients wait for less than 2 s meanwhile."""
    waits = []

    def ask() -> None:
        while not done:
            for path, body in (("/health", None), (COMPLETIONS, SHORT)):
                begin = time.monotonic()
                response = client.get(path) if body is None else client.post(path, json=body)
                assert response.status_code == 200, response.text
                waits.append(time.monotonic() - begin)
            time.sleep(0.05)

    done = False
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{server.port}", headers=KEY, timeout=60) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        asking = pool.submit(ask)
        try:
            yield
        finally:
            done = True
        asking.result()
    assert waits and max(waits) < 2, waits


def raw_answer(server, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
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
    assert statistics.median(waits) < 0.03, "delayed acknowledgements take 40 ms"


def test_health_may_be_asked_by_head(attacked):
    response = attacked.client.head("/health")
    assert (response.status_code, response.content) == (200, b"")


def test_thousands_of_half_open_connections_keep_nobody_out(attacked):
    count = 4200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count + 500:
        pytest.skip("this process may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 500), hard))
    try:
        with contextlib.ExitStack() as stack:
            begin = time.monotonic()
            for _ in range(count):
                address = "127.0.0.1", attacked.port
                half = stack.enter_context(socket.create_connection(address, timeout=20))
                half.sendall(b"GET /health HTTP/1.1\r\nHost: local")
            with others_are_served(attacked):
                time.sleep(0.5)
            assert time.monotonic() - begin < 9, "too slow to have met the limit"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_large_tools_are_refused_before_any_work(attacked):
    properties = {f"p{number}": {"type": "string"} for number in range(120_000)}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": function}],
    }
    content = json.dumps(body).encode()
    assert len(content) > 3 << 20
    headers = {"content-type": "application/json"}
    with others_are_served(attacked), ThreadPoolExecutor(6) as pool:
        posts = [
            pool.submit(attacked.client.post, path, content=content, headers=headers)
            for path in (CHAT, CHAT, CHAT, CHAT, CHAT, "/tokenize")
        ]
        for post in posts:
            response = post.result()
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["param"] == "tools" and "4096 JSON values" in error["message"]


def test_long_texts_are_refused_before_they_are_tokenized(attacked):
    text = "one more word " * 500_000
    bodies = [
        (COMPLETIONS, {"prompt": text}),
        (COMPLETIONS, {"prompt": [3] * 1_000_000}),
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": [{"role": "user", "content": text}]}),
    ]
    with others_are_served(attacked):
        for path, body in bodies:
            begin = time.monotonic()
            response = attacked.post(path, body)
            assert time.monotonic() - begin < 3, path
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "shorten it" in error["message"]


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
    with socket.create_connection(("127.0.0.1", attacked.port), timeout=20) as raw:
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


def test_templates_that_take_for_ever_are_bounded_and_do_not_outlive_the_server(attacked):
    """Ends the server of this module."""
    slow = {"messages": [{"role": "user", "content": "slow"}]}
    slow |= {"tools": [{"type": "function", "function": {"name": "f"}}]}
    room = 4 + 12
    with ThreadPoolExecutor(room) as pool:
        posts = [pool.submit(attacked.post, CHAT, slow) for _ in range(room)]
        with others_are_served(attacked):
            give_up = time.monotonic() + 20
            while (response := attacked.post(CHAT, slow | {"n": 2})).status_code != 429:
                assert time.monotonic() < give_up
        assert "being prepared" in response.json()["error"]["message"]
        assert response.headers["retry-after"]
        begin = time.monotonic()
        assert attacked.stop(within_s=30) == 0, attacked.text()
        assert time.monotonic() - begin < 20
        for post in posts:
            assert post.exception() is not None or post.result().status_code in (429, 500, 503)
    assert "Traceback" not in attacked.text()
