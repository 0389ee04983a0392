"""Replicas killed with -9 at random moments under streams: what is lost, and what it costs.

Streams are asked again and again, by as many connections, while one replica after another is
killed, each once all are ready. Every answer is compared, token by token, with that of the same
prompt before the first kill. Reported beside the rate without kills: for how long a stream pauses
at most, after each kill, and how long a killed replica takes to be ready again.

    python benchmarks/replica_kills.py
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import re
import signal
import statistics
import sys
import time
from typing import Any

import httpx
from served import served
from table import print_table

CONTEXT = 256


class Streams:
    """Connections that ask for a stream each, and again when it has ended, until `stop`."""

    def __init__(self, client: httpx.AsyncClient, bodies: list[dict[str, Any]]) -> None:
        self._client = client
        self._bodies = bodies
        self.answers: list[tuple[int, list[int]]] = []
        self.lost: list[str] = []
        self.longest_pause_s = 0.0
        self.stop = False

    async def run_once(self) -> float:
        """One stream for each connection; returns the seconds that they took."""
        begin = time.monotonic()
        await asyncio.gather(*(self._ask(n, once=True) for n in range(len(self._bodies))))
        return time.monotonic() - begin

    async def run_on(self) -> None:
        """Until `stop`."""
        await asyncio.gather(*(self._ask(n, once=False) for n in range(len(self._bodies))))

    async def _ask(self, number: int, once: bool) -> None:
        while True:
            try:
                self.answers.append((number, await self._stream(self._bodies[number])))
            except (httpx.HTTPError, ValueError, KeyError) as error:
                self.lost.append(repr(error))
            if once or self.stop:
                return

    async def _stream(self, body: dict[str, Any]) -> list[int]:
        tokens, before, ended = [], time.monotonic(), False
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                self.longest_pause_s = max(self.longest_pause_s, now - before)
                before, choice = now, json.loads(line.removeprefix("data: "))["choices"][0]
                tokens += choice["token_ids"] or []
                ended = choice["finish_reason"] == "length"
        if not ended:
            raise ValueError("a stream ended before its last token")
        return tokens


async def killed(url: str, args: argparse.Namespace) -> None:
    draw = random.Random(args.seed)
    bodies = [
        {
            "prompt": [draw.randint(1000, 49000) for _ in range(draw.randint(8, 64))],
            "max_tokens": args.tokens,
            "temperature": number % 2,
            "seed": number,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        for number in range(args.streams)
    ]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=None) as client:
        calm = Streams(client, bodies)
        calm_s = await calm.run_once()
        expected = dict(calm.answers)
        streams, begin = Streams(client, bodies), time.monotonic()
        asking = asyncio.create_task(streams.run_on())
        ready_s, pause_s = [], []
        for number in range(args.kills):
            await asyncio.sleep(draw.uniform(0, args.within))
            pids = await _ready_pids(client, args.replicas)
            victim, killed_s = draw.choice(pids), time.monotonic()
            streams.longest_pause_s = 0.0
            os.kill(victim, signal.SIGKILL)
            while victim in await _pids(client):
                await asyncio.sleep(0.1)
            await _ready_pids(client, args.replicas)
            ready_s.append(time.monotonic() - killed_s)
            pause_s.append(streams.longest_pause_s)
            told = f"pause {pause_s[-1]:.1f} s, ready again after {ready_s[-1]:.1f} s"
            print(f"kill {number + 1} of {args.kills}: {told}", file=sys.stderr)
        streams.stop = True
        await asking
        took_s = time.monotonic() - begin
        redispatched = await _metric(client, "jaxserve:redispatched_requests_total")
    if calm.lost:
        raise SystemExit(f"streams were lost before any kill: {calm.lost[0]}")
    num_wrong = sum(_num_wrong(tokens, expected[number]) for number, tokens in streams.answers)
    calm_rate = len(calm.answers) * args.tokens / calm_s
    rate = len(streams.answers) * args.tokens / took_s
    print_table(
        f"{args.kills} kills of one of {args.replicas} replicas, {args.streams} streams of "
        f"{args.tokens} tokens at a time",
        ("", "without kills", "with kills"),
        [
            ("streams answered", len(calm.answers), len(streams.answers)),
            ("streams lost", len(calm.lost), len(streams.lost)),
            ("tokens wrong", 0, num_wrong),
            ("requests that went on elsewhere", 0, redispatched),
            ("tokens/s", calm_rate, rate),
            ("of that without kills", 1.0, rate / calm_rate),
            ("longest pause of a stream, median s", None, statistics.median(pause_s)),
            ("longest pause of a stream, longest s", calm.longest_pause_s, max(pause_s)),
            ("replica ready again, median s", None, statistics.median(ready_s)),
            ("replica ready again, longest s", None, max(ready_s)),
        ],
    )
    if streams.lost or num_wrong:
        raise SystemExit(f"{len(streams.lost)} lost, {num_wrong} wrong: {streams.lost[:1]}")


def _num_wrong(tokens: list[int], expected: list[int]) -> int:
    """Tokens that are other ones, or too many or too few."""
    pairs = itertools.zip_longest(tokens, expected)
    return sum(one != other for one, other in pairs)


async def _ready_pids(client: httpx.AsyncClient, count: int) -> list[int]:
    """The processes of all replicas, once all are ready."""
    while True:
        status = (await client.get("/cluster/status")).json()
        if [each["state"] for each in status["replicas"]] == ["ready"] * count:
            return [_pid(each) for each in status["replicas"]]
        await asyncio.sleep(0.1)


async def _pids(client: httpx.AsyncClient) -> list[int]:
    status = (await client.get("/cluster/status")).json()
    return [_pid(each) for each in status["replicas"] if each["state"] == "ready"]


def _pid(replica: dict[str, Any]) -> int:
    return int(re.match(r"process (\d+) ", replica["process"])[1])


async def _metric(client: httpx.AsyncClient, name: str) -> int:
    text = (await client.get("/metrics")).text
    return int(float(re.search(rf"^{name}\S* (\S+)$", text, re.MULTILINE)[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48, help="of each stream")
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--within", type=float, default=5.0, help="seconds from ready to a kill")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    options = [f"--max-model-len={CONTEXT}", f"--data-parallel-size={args.replicas}"]
    options.append(f"--max-num-seqs={args.streams // args.replicas}")
    with served(args.model, *options) as url:
        asyncio.run(killed(url, args))


if __name__ == "__main__":
    main()
