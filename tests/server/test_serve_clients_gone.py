"""Clients that go away, or do not read: their requests end, and others are not affected."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from patience import PATIENCE_S
from server_process import prompt_of

pytestmark = pytest.mark.interfaces

PATH = "/v1/completions"
ENDLESS = {"max_tokens": 1900, "ignore_eos": True, "temperature": 0}

# When it is told to begin it reads one event and then only waits, to be killed.
_CLIENT = """
import sys, time, httpx
sys.stdin.readline()
with httpx.stream("POST", sys.argv[1], json={"prompt": "kill me", "max_tokens": 1900,
                  "ignore_eos": True, "stream": True}, timeout=600) as answer:
    next(answer.iter_lines())
    print("streaming", flush=True)
    time.sleep(600)
"""


def aborted(server) -> float:
    return server.metrics()["vllm:request_success_total", "abort"]


def wait_for_aborts(server, count: float) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while aborted(server) < count and time.monotonic() < give_up:
        time.sleep(0.02)
    assert aborted(server) == count


async def hung_up(server, bodies, open_sequences: int) -> None:
    """Posts that are given up once the server has so many sequences of theirs."""
    server.wait_idle()  # Of earlier clients.
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        posts = [
            asyncio.create_task(client.post(PATH, json=body, timeout=PATIENCE_S)) for body in bodies
        ]
        name = ("jaxserve:open_sequences",)
        while (await asyncio.to_thread(server.metrics))[name] < open_sequences:
            await asyncio.sleep(0.01)
        for post in posts:
            post.cancel()
        await asyncio.gather(*posts, return_exceptions=True)


@pytest.mark.parametrize("stream", [True, False])
def test_hanging_up_frees_the_pages(server, stream):
    before = aborted(server)
    body = {"prompt": prompt_of(50), "stream": stream, "n": 3, **ENDLESS, "temperature": 1}
    if stream:
        with server.client.stream("POST", PATH, json=body) as answer:
            next(answer.iter_lines())
    else:
        asyncio.run(hung_up(server, [body], 3))
    wait_for_aborts(server, before + 3)


def test_hanging_up_while_waiting_in_the_queue(server):
    before = aborted(server)
    bodies = [{"prompt": prompt_of(9, i), **ENDLESS} for i in range(20)]
    asyncio.run(hung_up(server, bodies, 20))
    wait_for_aborts(server, before + 20)


def test_clients_killed_mid_stream(server):
    before = aborted(server)
    url = f"http://127.0.0.1:{server.port}{PATH}"
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", _CLIENT, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(3)
    ]
    for client in clients:
        client.stdin.write(b"\n")
        client.stdin.close()
        assert client.stdout.readline() == b"streaming\n"
        os.kill(client.pid, signal.SIGKILL)
        client.wait()
        client.stdout.close()
    wait_for_aborts(server, before + 3)


def test_an_abort_storm_leaves_others_alone(server):
    params = {
        "prompt": prompt_of(30, seed=4),
        "max_tokens": 200,
        "temperature": 0,
        "ignore_eos": True,
    }
    wanted = server.complete(params)["choices"][0]["text"]
    responses = []
    survivor = threading.Thread(target=lambda: responses.append(server.complete(params)))

    async def storm():
        rng = random.Random(1)
        limits = httpx.Limits(max_connections=64)
        base_url = f"http://127.0.0.1:{server.port}"

        async def one(client, number):
            body = {"prompt": prompt_of(20, number), "stream": bool(number % 2), **ENDLESS}
            await asyncio.sleep(rng.random())
            post = asyncio.create_task(client.post(PATH, json=body))
            await asyncio.sleep(rng.random())
            post.cancel()
            await asyncio.gather(post, return_exceptions=True)

        async with httpx.AsyncClient(
            base_url=base_url, limits=limits, timeout=PATIENCE_S
        ) as client:
            await asyncio.gather(*(one(client, number) for number in range(150)))

    survivor.start()
    asyncio.run(storm())
    survivor.join()
    assert responses[0]["choices"][0]["text"] == wanted
    server.wait_idle()


def test_a_slow_reader_delays_no_other_client(server):
    """Its answer is generated to the end while it reads nothing, and it gets all of it."""
    body = b'{"prompt": "slow", "max_tokens": 1900, "ignore_eos": true, "n": 4, "stream": true,'
    body += b' "logprobs": 20, "stream_options": {"include_usage": true}}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    done = ("vllm:request_success_total", "length")
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", server.port))
        before = server.metrics()[done]
        raw.sendall(head + body)
        give_up = time.monotonic() + PATIENCE_S
        while server.metrics()[done] < before + 4 and time.monotonic() < give_up:
            time.sleep(0.1)
        assert server.metrics()[done] == before + 4, "it waited for its reader"
        assert server.metrics()["jaxserve:open_sequences",] == 4
        received = b""
        while part := raw.recv(1 << 16):
            received += part
    assert b'"completion_tokens":7600' in received
    assert received.rstrip().endswith(b"0") and b"data: [DONE]" in received[-100:]
    assert received.count(b"data: ") < 7600, "what was not read was not merged"


def test_256_streams_at_once(server):
    async def one(client, number):
        body = {"prompt": prompt_of(8, number), "max_tokens": 16, "temperature": 0, "stream": True}
        ends = 0
        async with client.stream("POST", PATH, json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                ends += line.count('"finish_reason":"')
        return ends

    async def everything():
        limits = httpx.Limits(max_connections=None)
        base_url = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(
            base_url=base_url, limits=limits, timeout=PATIENCE_S
        ) as client:
            return await asyncio.gather(*(one(client, number) for number in range(256)))

    ends = asyncio.run(everything())
    assert ends == [1] * 256
