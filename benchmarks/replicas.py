"""Replicas against one engine: the same requests to `jaxserve serve` with and without
`--data-parallel-size`, on the same cores; and what a router adds to the time of a request, beside
what Ray takes for the calls of an actor that does nothing.

Rounds alternate, and the best of each is reported: other work on the machine only slows a round
down. What a router adds is measured without HTTP: requests for one token, each alone, go by turns
to an engine and to a router of one replica, which has the same cores. Reported is the median of the
differences, of prompts that are sent to both. After each pair, an actor is called as a replica is:
by a call that waits, and another one that makes it answer.

    python benchmarks/replicas.py
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from typing import Any

import numpy as np
import ray
from served import complete_all, served
from table import print_table

from jaxserve import AsyncEngine, SamplingParams
from jaxserve.cluster.ray_replicas import load_replicas
from jaxserve.core.settings.config import EngineConfig
from jaxserve.engine.client import EngineClient

CONTEXT = 512
BUDGET = 160


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32, help="generated for each request")
    parser.add_argument("--seqs", type=int, default=32, help="running at once, in all")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--alone", type=int, default=100, help="requests for one token")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    lengths = rng.integers(16, 129, args.requests)
    prompts = [rng.integers(1000, 49000, length).tolist() for length in lengths]
    params = {"temperature": 0, "max_tokens": args.tokens, "ignore_eos": True}
    bodies = [{"prompt": prompt, **params} for prompt in prompts]
    options = [f"--max-model-len={CONTEXT}", f"--max-num-batched-tokens={BUDGET}"]
    options.append("--no-enable-prefix-caching")
    sizes = {
        "one engine": [f"--max-num-seqs={args.seqs}"],
        f"{args.replicas} replicas": [
            f"--max-num-seqs={args.seqs // args.replicas}",
            f"--data-parallel-size={args.replicas}",
        ],
    }
    seconds: dict[str, list[float]] = {way: [] for way in sizes}
    answers = []
    with (
        served(args.model, *options, *sizes["one engine"]) as one,
        served(args.model, *options, *sizes[f"{args.replicas} replicas"]) as several,
    ):
        urls = dict(zip(sizes, (one, several)))
        for _ in range(args.turns):
            for way, url in urls.items():
                begin = time.monotonic()
                answers.append(complete_all(url, bodies))
                seconds[way].append(time.monotonic() - begin)
    tokens = args.requests * args.tokens
    best = {way: min(times) for way, times in seconds.items()}
    print_table(
        f"{args.requests} requests, {args.tokens} tokens each, {args.seqs} at once",
        ("", "seconds", "tokens/s", "of one engine"),
        [
            (
                way,
                f"{best[way]:.2f}",
                f"{tokens / best[way]:.0f}",
                f"{best['one engine'] / best[way]:.2f}x",
            )
            for way in sizes
        ],
    )
    alone = [rng.integers(1000, 49000, 32).tolist() for _ in range(args.alone)]
    engine_ms, router_ms, added_ms, ray_ms = _alone_ms(args.model, alone)
    print_table(
        f"{args.alone} requests for one token, each alone",
        ("", "median ms a request"),
        [
            ("an engine", engine_ms),
            ("a router of one replica", router_ms),
            ("added", added_ms),
            ("two calls of Ray alone", ray_ms),
        ],
    )
    num_other = sum(one != other for each in answers for one, other in zip(each, answers[0]))
    if num_other:
        raise SystemExit(f"{num_other} of {len(answers) * args.requests} answers are other ones")


class Idle:
    """An actor that is called as a replica is, and does nothing."""

    def __init__(self) -> None:
        self._submitted = asyncio.Event()

    async def submit(self) -> None:
        self._submitted.set()

    async def updates(self) -> None:
        await self._submitted.wait()
        self._submitted.clear()


def _alone_ms(model: str, prompts: list[list[int]]) -> tuple[float, ...]:
    """Median times of a request to an engine, to a router of one replica, by how much the second
    is longer, and of the calls that a router makes, to an actor that does nothing."""
    settings = {
        "model": model,
        "max_model_len": CONTEXT,
        "max_num_batched_tokens": BUDGET,
        "max_num_seqs": 1,
        "page_size": 16,
        "kv_cache_memory_bytes": 1 << 28,
    }
    with (
        contextlib.closing(AsyncEngine.load(**settings)) as engine,
        contextlib.closing(load_replicas(EngineConfig.of(**settings), 1)) as router,
    ):
        idle = ray.remote(num_cpus=0)(Idle).remote()
        times = asyncio.run(_ask_by_turns([engine, router], idle, prompts))
    one, routed, calls = zip(*times)
    added = [router_ms - engine_ms for engine_ms, router_ms, _ in times]
    return tuple(map(statistics.median, (one, routed, added, calls)))


async def _ask_by_turns(
    clients: list[EngineClient], idle: Any, prompts: list[list[int]]
) -> list[tuple[float, ...]]:
    """The milliseconds that each client takes for a token after each prompt, and those of the
    calls of an actor that does nothing."""
    params, times = SamplingParams(temperature=0, max_tokens=1), []
    for number, prompt in enumerate(prompts):
        of_each = []
        for client in clients:
            begin = time.monotonic()
            async with await client.submit([prompt], params, [f"{number}"]) as updates:
                async for _ in updates:
                    pass
            of_each.append(1000 * (time.monotonic() - begin))
        updates = asyncio.wrap_future(idle.updates.remote().future())
        await asyncio.sleep(of_each[0] / 1000)  # as long as a replica computes
        begin = time.monotonic()
        idle.submit.remote()
        await updates
        of_each.append(1000 * (time.monotonic() - begin))
        times.append(tuple(of_each))
    return times


if __name__ == "__main__":
    main()
