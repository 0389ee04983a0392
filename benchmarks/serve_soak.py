"""Ten thousand requests of every kind to one server, and its memory over time.

Many clients disconnect, some requests are invalid. The slope of the resident memory is that of a
least-squares line through the second half, when all caches are full, in bytes per request.

    python benchmarks/serve_soak.py MODEL
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
from typing import Any, NamedTuple

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from served import served
from table import print_table

CONNECTIONS = 32
SAMPLES = 40


class Soak(NamedTuple):
    """What became of a server: requests by how they ended, memory in bytes after so many of them,
    and at the end what should be nothing."""

    ended: dict[str, int]
    memory_bytes: list[tuple[int, float]]
    left: dict[str, float]

    @property
    def slope_bytes(self) -> float:
        """Bytes that memory grows by a request, in the second half."""
        requests, memory = np.array(self.memory_bytes[len(self.memory_bytes) // 2 :]).T
        return float(np.polyfit(requests, memory, 1)[0])


def soak(url: str, requests: int) -> Soak:
    """Send so many requests to a server of any model, a few dozen at a time."""
    return asyncio.run(_soak(url, requests))


async def _soak(url: str, requests: int) -> Soak:
    numbers = iter(range(requests))
    ended: dict[str, int] = {}
    memory_bytes: list[tuple[int, float]] = []
    limits = httpx.Limits(max_connections=CONNECTIONS + 1)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as client:

        async def one_after_another() -> None:
            for number in numbers:
                how = await _one(client, random.Random(number))
                ended[how] = ended.get(how, 0) + 1
                if number % max(1, requests // SAMPLES) == 0:
                    sample = await _samples(client)
                    memory_bytes.append((number, sample["process_resident_memory_bytes"]))

        await asyncio.gather(*(one_after_another() for _ in range(CONNECTIONS)))
        for _ in range(200):
            found = await _samples(client)
            left = {name: found[name] for name in ("open_sequences", "pages used")}
            if not any(left.values()):
                break
            await asyncio.sleep(0.1)
    return Soak(ended, sorted(memory_bytes), left)


async def _one(client: httpx.AsyncClient, rng: random.Random) -> str:
    body: dict[str, Any] = {
        "prompt": [rng.randrange(3, 250) for _ in range(rng.randrange(1, 60))],
        "max_tokens": rng.randrange(1, 24),
        "stream": rng.random() < 0.5,
        "n": rng.choice((1, 1, 1, 3)),
        "logprobs": rng.choice((None, None, 5)),
    }
    kind = rng.random()
    if kind < 0.1:
        body["n"] = 1000
    if kind < 0.8:
        response = await client.post("/v1/completions", json=body)
        return str(response.status_code)
    post = asyncio.create_task(client.post("/v1/completions", json=body | {"max_tokens": 60}))
    await asyncio.sleep(rng.random() * 0.1)
    post.cancel()
    await asyncio.gather(post, return_exceptions=True)
    return "hung up"


async def _samples(client: httpx.AsyncClient) -> dict[str, float]:
    text = (await client.get("/metrics")).text
    samples = itertools.chain.from_iterable(
        family.samples for family in text_string_to_metric_families(text)
    )
    found = {sample.name: sample.value for sample in samples if "state" not in sample.labels}
    pages = [line for line in text.splitlines() if line.startswith("jaxserve:kv_pages{")]
    used = next(line for line in pages if 'state="used"' in line)
    found["pages used"] = float(used.split()[-1])
    found["open_sequences"] = found["jaxserve:open_sequences"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=10_000)
    args = parser.parse_args()
    settings = ("--max-num-seqs=8", "--max-num-batched-tokens=72", "--max-model-len=128")
    with served(args.model, *settings, f"--kv-cache-memory-bytes={64 << 20}") as url:
        found = soak(url, args.requests)
    first, last = found.memory_bytes[0][1], found.memory_bytes[-1][1]
    print_table(
        f"{args.requests:,} requests, {CONNECTIONS} at a time",
        ("", "value"),
        [
            *((f"ended: {how}", count) for how, count in sorted(found.ended.items())),
            ("memory after the first, MiB", first / 2**20),
            ("memory after the last, MiB", last / 2**20),
            ("slope of the second half, bytes a request", found.slope_bytes),
            *((f"left: {name}", value) for name, value in found.left.items()),
        ],
    )


if __name__ == "__main__":
    main()
