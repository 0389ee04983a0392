"""Clients that ask for much, and do not stay for it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from patience import PATIENCE_S
from server_process import prompt_of

pytestmark = pytest.mark.attack

PATH = "/v1/completions"
STREAMS, HANG_UPS, KILLED, UNREAD = 512, 200, 12, 20
GROWTH_BYTES = 64 << 20
"""Of the server's memory, over all that is sent here after the first streams."""

_CLIENT = """
import sys, time, httpx
body = {"prompt": "kill me", "max_tokens": 60, "ignore_eos": True, "stream": True}
headers = {"authorization": "Bearer attacker"}
with httpx.stream("POST", sys.argv[1], json=body, headers=headers, timeout=600) as answer:
    next(answer.iter_lines())
    print("streaming", flush=True)
    time.sleep(600)
"""


def client_of(server) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=STREAMS)
    url = f"http://127.0.0.1:{server.port}"
    return httpx.AsyncClient(
        base_url=url, headers=server.client.headers, limits=limits, timeout=PATIENCE_S
    )


def body_of(number: int, **fields) -> dict:
    prompt = prompt_of(8 + number % 30, number)
    return {"prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": True, **fields}


def memory(server) -> float:
    return server.metrics()["process_resident_memory_bytes",]


@pytest.fixture(scope="module")
def grown(attacked):
    """The server after 512 streams, by its memory before the rest."""

    async def one(client, number) -> int:
        ends = 0
        async with client.stream("POST", PATH, json=body_of(number)) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                ends += line == "data: [DONE]"
        return ends

    async def everything() -> list[int]:
        async with client_of(attacked) as client:
            return await asyncio.gather(*(one(client, number) for number in range(STREAMS)))

    assert asyncio.run(everything()) == [1] * STREAMS
    attacked.wait_idle()
    return memory(attacked)


def test_streams_at_once(grown):
    assert grown > 0


def test_hang_ups(attacked, grown):
    """At any moment: before the answer, or after a few of its tokens."""

    async def one(client, number) -> None:
        fields = {"max_tokens": 60, "ignore_eos": True, "stream": number % 3 > 0}
        post = asyncio.create_task(client.post(PATH, json=body_of(number, **fields)))
        await asyncio.sleep(number % 20 / 40)
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)

    async def everything() -> None:
        async with client_of(attacked) as client:
            await asyncio.gather(*(one(client, number) for number in range(HANG_UPS)))

    asyncio.run(everything())
    attacked.wait_idle()


def test_clients_killed_mid_stream(attacked, grown):
    url = f"http://127.0.0.1:{attacked.port}{PATH}"
    clients = [
        subprocess.Popen([sys.executable, "-c", _CLIENT, url], stdout=subprocess.PIPE)
        for _ in range(KILLED)
    ]
    for client in clients:
        assert client.stdout.readline() == b"streaming\n"
        os.kill(client.pid, signal.SIGKILL)
        client.wait()
        client.stdout.close()
    attacked.wait_idle()


def test_responses_that_clients_do_not_read(attacked, grown):
    body = b'{"prompt": "d", "max_tokens": 60, "n": 8, "ignore_eos": true, "logprobs": 20, '
    body += b'"stream": true}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer attacker\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    open_ = []
    for _ in range(UNREAD):
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", attacked.port))
        raw.sendall(head + body)
        open_.append(raw)
    attacked._until(lambda: not attacked.metrics()["vllm:num_requests_running",], PATIENCE_S)
    for raw in open_:
        raw.close()
    attacked.wait_idle()


def test_nothing_has_grown(attacked, grown):
    assert memory(attacked) - grown < GROWTH_BYTES
