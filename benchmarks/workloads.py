"""Benchmark workloads: drawn from a seed, or read from a trace."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path

from jaxserve.core.sequence import SharedPrefix

_SECOND_US = 1_000_000


@dataclasses.dataclass(frozen=True)
class Job:
    """One request as a simulation sees it.

    It ends by itself after `output_tokens`, or at `max_tokens` if that is less (None: the context
    limit), or when its client leaves at `abort_us`. Its prompt is `token_ids`, or if that is None
    one that begins like no other; `shared_prefix` is what it is known to share with other jobs.
    """

    arrival_us: int
    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None = None
    priority: int = 0
    abort_us: int | None = None
    tenant: str | None = None
    token_ids: Sequence[int] | None = None
    shared_prefix: SharedPrefix | None = None


def conversation(count: int, rate_per_s: float, seed: int) -> list[Job]:
    """Poisson arrivals with log-normal lengths, fitted to the Azure conversation trace of 2023
    (means 1,155 and 211 tokens)."""
    rng = random.Random(seed)
    jobs, now = [], 0.0
    for _ in range(count):
        now += rng.expovariate(rate_per_s)
        prompt = min(max(round(rng.lognormvariate(6.63, 0.98)), 1), 4096)
        output = min(max(round(rng.lognormvariate(5.02, 0.86)), 1), 1024)
        jobs.append(Job(round(now * _SECOND_US), prompt, output))
    return jobs


def read_trace(path: Path, count: int, rate_per_s: float) -> list[Job]:
    """The first `count` rows of a CSV with `arrived_at` (seconds), `num_prefill_tokens` and
    `num_decode_tokens`, its arrivals stretched to the wanted mean rate."""
    with path.open() as lines:
        rows = [row for row, _ in zip(csv.DictReader(lines), range(count))]
    times = [float(row["arrived_at"]) for row in rows]
    scale = len(rows) / rate_per_s / (times[-1] - times[0]) if len(rows) > 1 else 1.0
    return [
        Job(
            arrival_us=round((time - times[0]) * scale * _SECOND_US),
            prompt_tokens=min(int(row["num_prefill_tokens"]), 4096),
            output_tokens=min(max(int(row["num_decode_tokens"]), 1), 1024),
        )
        for time, row in zip(times, rows)
    ]


def read_block_trace(path: Path, count: int, block_tokens: int) -> list[Job]:
    """The first `count` rows of a trace in JSON lines with `timestamp` (ms), `input_length`,
    `output_length` and `hash_ids`, an id for each block of 512 prompt tokens; up to the end of a
    block with the same id two prompts are alike (Mooncake, Qin et al. 2025).

    A block becomes `block_tokens` tokens, and all lengths shrink in proportion.
    """

    def scaled(num_tokens: int) -> int:
        return -(-num_tokens * block_tokens // 512)

    jobs = []
    with path.open() as lines:
        for line, _ in zip(lines, range(count)):
            row = json.loads(line)
            length = scaled(row["input_length"])
            # Blocks with other ids differ in their first token already.
            tokens = [block for block in row["hash_ids"] for _ in range(block_tokens)][:length]
            output = max(1, scaled(row["output_length"]))
            jobs.append(Job(row["timestamp"] * 1000, length, output, output, token_ids=tokens))
    return jobs


def from_arguments(description: str, count: int, rate_per_s: float) -> list[Job]:
    """The workload that the command line asks for; `count` and `rate_per_s` are its defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--trace", type=Path, help="CSV of real lengths and arrival times")
    parser.add_argument("--num-requests", type=int, default=count)
    parser.add_argument("--rate", type=float, default=rate_per_s, help="requests per second")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.trace is not None:
        return read_trace(args.trace, args.num_requests, args.rate)
    return conversation(args.num_requests, args.rate, args.seed)


def backlog(jobs: list[Job]) -> list[Job]:
    """The same requests, all there from the start."""
    return [dataclasses.replace(job, arrival_us=0) for job in jobs]
