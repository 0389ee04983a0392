"""Replicas against one engine: the same requests to `jaxserve serve` with and without
`--data-parallel-size`, on the same cores.

Rounds alternate, and the best of each is reported: other work on the machine only slows a round
down. The overhead of the router is the time of a request for one token, alone, less that of the
same request to one engine.

    python benchmarks/replicas.py
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from served import complete_all, served
from table import print_table

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
    parser.add_argument("--alone", type=int, default=50, help="requests for one token, alone")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    lengths = rng.integers(16, 129, args.requests)
    prompts = [rng.integers(1000, 49000, length).tolist() for length in lengths]
    wish = {"temperature": 0, "max_tokens": args.tokens, "ignore_eos": True}
    bodies = [{"prompt": prompt, **wish} for prompt in prompts]
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
    alone_ms: dict[str, float] = {}
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
        for way, url in urls.items():
            alone_ms[way] = _alone_ms(url, prompts[0][:8], args.alone)
    if any(answer != answers[0] for answer in answers):
        raise SystemExit("the answers differ")
    tokens = args.requests * args.tokens
    best = {way: min(times) for way, times in seconds.items()}
    print_table(
        f"{args.requests} requests, {args.tokens} tokens each, {args.seqs} at once",
        ("", "seconds", "tokens/s", "of one engine", "one token alone, ms"),
        [
            (
                way,
                f"{best[way]:.2f}",
                f"{tokens / best[way]:.0f}",
                f"{best['one engine'] / best[way]:.2f}x",
                f"{alone_ms[way]:.1f}",
            )
            for way in sizes
        ],
    )


def _alone_ms(url: str, prompt: list[int], count: int) -> float:
    """The median time of a request for one token."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    times = []
    for _ in range(count):
        begin = time.monotonic()
        complete_all(url, [body])
        times.append(1000 * (time.monotonic() - begin))
    return statistics.median(times)


if __name__ == "__main__":
    main()
