"""A server process for benchmarks, and a load of many concurrent connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

READY_S = 900


@contextlib.contextmanager
def served(*args: str) -> Iterator[str]:
    """The URL of `jaxserve serve` with these arguments, once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "jaxserve", "serve", *args, f"--port={port}"],
        stderr=subprocess.DEVNULL,
    )
    url, give_up = f"http://127.0.0.1:{port}", time.monotonic() + READY_S
    try:
        while not _is_ready(url):
            if server.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError("the server has ended; start it by hand to see why.")
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait()


def _is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health").status_code == 200
    return False


def complete_all(url: str, bodies: Sequence[dict[str, Any]]) -> list[str]:
    """The texts of completions, all asked for at once; streamed where the body says so."""
    return asyncio.run(_complete_all(url, bodies))


async def _complete_all(url: str, bodies: Sequence[dict[str, Any]]) -> list[str]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=None) as client:
        return await asyncio.gather(*(_complete(client, body) for body in bodies))


async def _complete(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    if not body.get("stream"):
        response = await client.post("/v1/completions", json=body)
        response.raise_for_status()
        return response.json()["choices"][0]["text"]
    text = ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
    return text
