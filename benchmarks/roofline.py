"""The least that kernels and whole steps can take on an H200 and a TPU v6e, by formula.

Bytes are what must be read or written once, FLOPs two for a multiplication and an addition, and the
floor is the longer of both at the rates that makers state. The model of a decode kernel counts the
tiles of keys and values that its busiest multiprocessor loads. Nothing is run. What
`benchmarks/h200.py` measured is beside it with --out DIR of its calls.

    PYTHONPATH=. python benchmarks/roofline.py
"""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np
from device import cases
from device.attention import Attention
from device.cases import Case
from device.records import Records
from scale import MODELS
from table import print_table

from jaxserve.runtime.hardware.devices import collective_rates
from pallas_kernels.collective_matmul import CollectiveRates
from pallas_kernels.compat.gpu import HOPPER_SMS
from pallas_kernels.paged_attention.gpu.decode import MAX_SPLITS, SPLIT_TOKENS
from pallas_kernels.paged_attention.gpu.decode_work import TILE, Cutting, worker_of

H200, V6E = "NVIDIA H200", "TPU v6 lite"
MODEL = MODELS["Llama-3.1-8B"]
LAYERS, HIDDEN, FF, VOCAB = (
    MODEL[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
)
HEADS, KV_HEADS, HEAD_DIM = (
    MODEL[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
)
CONTEXT = 2048
STREAMS = 2
"""Of a multiprocessor in the Hopper decode kernel."""


def rates_of(device: str) -> CollectiveRates:
    """As its maker states them."""
    return collective_rates(SimpleNamespace(device_kind=device))


class Work(NamedTuple):
    """What must be moved and computed, and the modelled time of a kernel on an H200 if any."""

    name: str
    bytes: float
    flops: float
    modelled_us: float | None = None

    def limits_us(self, device: str) -> dict[str, float]:
        rates = rates_of(device)
        return {
            "memory": 1e6 * self.bytes / rates.memory_bytes_per_s,
            "compute": 1e6 * self.flops / rates.flops_per_s,
        }

    def floor(self, device: str) -> tuple[float, str]:
        """Microseconds, and what bounds them."""
        limits = self.limits_us(device)
        bound = max(limits, key=limits.__getitem__)
        return limits[bound], bound


def decode_us(spec: Attention) -> float:
    """Of decodes on an H200, if every multiprocessor has its share of the bandwidth and takes its
    units one after the other: those of the busiest.

    A unit is a split of a row for one KV head. Units go to the streams in turn, the first streams
    of all multiprocessors before the second ones.
    """
    contexts = np.int32(spec.contexts)
    cutting = Cutting.of(int(contexts.max()), SPLIT_TOKENS, max(1, MAX_SPLITS // spec.kv_heads))
    cut = jax.tree.map(np.asarray, cutting.cut(np.zeros_like(contexts), contexts))
    units = [
        min(size, tiles - size * split)
        for tiles, size, splits in zip(cut.tiles, cut.size, cut.splits)
        for split in range(splits)
        for _ in range(spec.kv_heads)
    ]
    workers = [
        worker_of(block, stream, HOPPER_SMS)
        for block in range(HOPPER_SMS)
        for stream in range(STREAMS)
    ]
    of_worker = np.zeros(len(workers), np.int64)
    np.add.at(of_worker, np.arange(len(units)) % len(workers), units)
    busiest = of_worker[workers].reshape(HOPPER_SMS, STREAMS).sum(axis=1).max()
    tile_bytes = spec.pages.page_bytes // spec.page_size // spec.kv_heads * TILE
    return 1e6 * busiest * tile_bytes / (rates_of(H200).memory_bytes_per_s / HOPPER_SMS)


def of_case(case: Case) -> Work:
    problem = case.spec.problem()
    plain = isinstance(case.spec, Attention) and case.spec.is_plain_decode
    modelled = decode_us(case.spec) if plain else None
    return Work(case.name, problem.bytes_moved, problem.flops, modelled)


def product(name: str, tokens: int, outputs: int, inputs: int) -> Work:
    """A bfloat16 weight [outputs, inputs] times so many tokens."""
    size = outputs * inputs + tokens * (outputs + inputs)
    return Work(name, 2 * size, 2 * tokens * outputs * inputs)


def step(name: str, decodes: int, prefill: int = 0) -> Work:
    """A whole step of Llama-3.1-8B, weights and KV once, logits of a token for each sequence.

    Decodes see CONTEXT tokens; a prefill is a whole prompt.
    """
    tokens, sampled = decodes + prefill, max(decodes, 1)
    qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    layer = HIDDEN * (qkv + HEADS * HEAD_DIM + 3 * FF)
    weights = 2 * (LAYERS * layer + VOCAB * HIDDEN + tokens * HIDDEN)
    kv_token = 2 * 2 * LAYERS * KV_HEADS * HEAD_DIM
    kv = kv_token * (decodes * (CONTEXT + 1) + prefill)
    pairs = decodes * CONTEXT + prefill * (prefill + 1) / 2
    attention = 4 * LAYERS * HEADS * HEAD_DIM * pairs
    flops = 2 * (tokens * LAYERS * layer + sampled * VOCAB * HIDDEN) + attention
    return Work(name, weights + kv, flops)


def kernels() -> list[Work]:
    """Every kernel at the shapes that `h200.py` measures, and the products of a layer."""
    named = {case.name: case for case in cases.ALL}
    wanted = [
        *("decode 1 x 1k", "decode 1 x 8k", "decode 1 x 33k", "decode 1 x 68k", "decode 1 x 128k"),
        *("decode 8 x 33k", "decode 64 x 8k", "prefill 16k", "a chunk of 2k at 64k"),
        *("a tree of 8 on 32k", "write 64 tokens", "write 2k tokens"),
        *("gather 64 pages", "scatter 64 pages", "copy 16 pages"),
        *("Q4_0, 1 tokens", "Q4_0, 16 tokens", "Q4_0, 4096 tokens", "fp8 x fp8, 16 tokens"),
    ]
    qkv = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    return [
        *(of_case(named[name]) for name in wanted),
        *(
            product(f"{what}, {tokens} tokens", tokens, *shape)
            for what, shape in {
                "qkv": (qkv, HIDDEN),
                "gate and up": (2 * FF, HIDDEN),
                "down": (HIDDEN, FF),
                "logits": (VOCAB, HIDDEN),
            }.items()
            for tokens in (1, 64)
        ),
        *(
            Work(f"RMS norm and residual, {tokens} tokens", 4 * 2 * tokens * HIDDEN, 0)
            for tokens in (64, 2048)
        ),
    ]


def steps() -> list[Work]:
    """Whole steps."""
    return [
        *(step(f"decode, batch {batch}", batch) for batch in (1, 8, 64, 256)),
        step("prefill 2k", 0, 2048),
        step("64 decodes and prefill 2k", 64, 2048),
    ]


def measured(out: Path | None) -> dict[str, float]:
    """Microseconds of cases, and of the engine's decode steps, that were right on an H200."""
    if out is None:
        return {}
    found: dict[str, float] = {}
    for record in Records(out / "records.jsonl").read():
        if record["status"] == "done" and "us" in record:
            found[record["key"]] = record["us"]
        if "step_ms" in record:
            batch = record["key"].rpartition(" ")[2]
            found[f"decode, batch {batch}"] = 1e3 * record["step_ms"]["greedy"]
    return found


def rows(works: list[Work], times: dict[str, float]) -> list[tuple[Any, ...]]:
    return [
        (
            *(work.name, work.bytes / 1e6, work.flops / 1e9),
            *(*work.floor(H200), work.modelled_us, times.get(work.name)),
            *work.floor(V6E),
        )
        for work in works
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="where h200.py wrote its records")
    times = measured(parser.parse_args().out)
    columns = (
        *("MB", "GFLOP", "H200 floor, us", "bound by", "modelled, us", "measured, us"),
        *("v6e floor, us", "bound by"),
    )
    print_table("Kernels", ("kernel", *columns), rows(kernels(), times))
    print_table("\nSteps of Llama-3.1-8B", ("step", *columns), rows(steps(), times))


if __name__ == "__main__":
    main()
