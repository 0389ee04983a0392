"""Capacity ratios that papers report, beside those of simulations on the same devices and models.

DistServe (Zhong et al. 2024, figure 1): OPT-13B, here a LLaMA of as many weights, on an A100,
prompts of 512 and outputs of 64 tokens, P90 TTFT within 0.4 s and P90 TPOT within 0.04 s. By the
data sheet first; then with the shares of its peaks that make prefill and decode alone as fast as
reported, so that an engine that has both to do is predicted.

Sarathi-Serve (Agrawal et al. 2024): Mistral-7B on an A100, and Yi-34B on two, by the data sheet,
with lengths drawn by the medians and 90th percentiles of its two data sets; P99 of times between
tokens, strict and relaxed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from table import print_table

from jaxserve.cli.described import Described
from jaxserve.core.config import EngineConfig
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.simulator.capacity import Load
from jaxserve.simulator.phases import decode_only, goodput, goodput_by_role, prefill_only
from jaxserve.simulator.placement import EngineGoodput, best_placement
from jaxserve.simulator.search import Engine
from jaxserve.simulator.simulation import Arrival
from jaxserve.simulator.slo import Slo

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16384,
}
MODELS = {
    "13B": {
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 40,
        "vocab_size": 50272,
    },
    "Mistral-7B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
    "Yi-34B": {
        "hidden_size": 7168,
        "intermediate_size": 20480,
        "num_hidden_layers": 60,
        "num_attention_heads": 56,
        "num_key_value_heads": 8,
        "vocab_size": 64000,
    },
}
LENGTHS = {
    "openchat": ((1730, 5696), (415, 834), 8192),
    "arxiv": ((7059, 12985), (208, 371), 16384),
}
"""Median and 90th percentile of prompts and of outputs, and the longest sequence."""
PREFILL, DECODE, BOTH = 5.6, 10.0, 1.6
"""Requests/s that DistServe reports of one A100."""
ROUNDS = 7
SARATHI = [
    # Model, devices that split a layer, strict and relaxed limits in seconds, and "up to".
    ("Mistral-7B", 1, 0.1, 0.5, 2.6),
    ("Yi-34B", 2, 0.2, 1.0, 3.7),
]


def described(folder: Path, model: str, **settings: Any) -> Described:
    path = folder / model
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(LLAMA | MODELS[model]))
    return Described.of(EngineConfig(str(path), dtype="bfloat16", **settings), "a100", None)


def load(lengths: Iterator[tuple[int, int]], count: int) -> Load:
    """Poisson arrivals, one request a second."""
    draw, now_s, arrivals = random.Random(0), 0.0, []
    for number, (prompt, output) in zip(range(count), lengths):
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        arrivals.append(Arrival(round(now_s * 1e6), [number] * prompt, params))
        now_s += draw.expovariate(1.0)
    return Load(arrivals, 1.0)


def drawn(data: str) -> Iterator[tuple[int, int]]:
    """Log-normal lengths of a data set, until forever."""
    draw, (prompts, outputs, longest) = random.Random(1), LENGTHS[data]

    def length(median: int, tenth: int) -> int:
        sigma = math.log(tenth / median) / 1.2816
        return max(1, round(draw.lognormvariate(math.log(median), sigma)))

    while True:
        prompt, output = length(*prompts), length(*outputs)
        if prompt + output < longest:
            yield prompt, output


def distserve(folder: Path, count: int) -> None:
    slo, requests = Slo.of("ttft_p90=400ms,tpot_p90=40ms"), load(iter([(512, 64)] * count), count)
    plans = {
        scheduler: described(
            folder,
            "13B",
            scheduler=scheduler,
            max_num_seqs=128,
            max_num_batched_tokens=128 + budget,
            max_model_len=2048,
        )
        for scheduler, budget in (("vllm", 2048), ("sarathi", 512))
    }

    def engine(scheduler: str, **shares: float) -> Engine:
        plan = plans[scheduler]
        plan = dataclasses.replace(plan, spec=dataclasses.replace(plan.spec, **shares))
        return Engine(plan.deployment, plan.times, requests)

    def by_role(scheduler: str, **shares: float) -> EngineGoodput:
        one = engine(scheduler, **shares)
        return goodput_by_role(one.deployment, one.times, requests, slo)

    def fitted(reported: float, role: Callable[[Engine], Engine], name: str, **known: float):
        """The shares with the one by which a role serves what is reported, by bisection."""
        low, high = 0.05, 1.0
        for _ in range(ROUNDS):
            middle = (low + high) / 2
            shares = known | {name: middle}
            enough = goodput(role(engine("vllm", **shares)), slo) >= reported
            low, high = (low, middle) if enough else (middle, high)
        return known | {name: (low + high) / 2}

    compared(by_role("vllm"), "by its data sheet")
    shares = fitted(PREFILL, prefill_only, "compute_efficiency")
    shares = fitted(DECODE, decode_only, "memory_efficiency", **shares)
    peaks = ", ".join(f"{name} {share:.2f}" for name, share in shares.items())
    compared(by_role("vllm", **shares), f"with {peaks}, fitted to each role alone")
    chunked = goodput(engine("sarathi", **shares), slo)
    print(f"\nboth, with chunked prefill: {chunked:.2f} requests/s")


def compared(found: EngineGoodput, shown: str) -> None:
    three = best_placement([found], 3)
    apart, published = three.goodput / three.devices, DECODE / 3
    rows = [
        ("prefill only", found.prefill, PREFILL),
        ("decode only", found.decode, DECODE),
        ("both, prompts first", found.both, BOTH),
        (f"{three.num_prefill} prefill + {three.num_decode} decode, by device", apart, published),
        ("prefill only / both", found.prefill / found.both, PREFILL / BOTH),
        ("apart / both", apart / found.both, published / BOTH),
    ]
    print_table(
        f"DistServe's example, requests/s of an A100 {shown}",
        ("", "simulated", "published", "difference %"),
        [(*row, 100 * (row[1] / row[2] - 1)) for row in rows],
    )


def sarathi(
    folder: Path, count: int, model: str, tensor: int, strict: float, relaxed: float, most: float
) -> None:
    rows = []
    for data in LENGTHS:
        requests = load(drawn(data), count)
        for name, limit, budget in (("strict", strict, 512), ("relaxed", relaxed, 2048)):
            slo = Slo.of(f"itl_p99={limit}s,ttft_p50=4s")
            found = {}
            for scheduler in ("vllm", "sarathi"):
                plan = described(
                    folder,
                    model,
                    scheduler=scheduler,
                    tensor_parallel_size=tensor,
                    max_num_seqs=128,
                    max_num_batched_tokens=128 + (16384 if scheduler == "vllm" else budget),
                    max_model_len=LENGTHS[data][2],
                )
                engine = Engine(plan.deployment, plan.times, requests)
                found[scheduler] = goodput(engine, slo)
            ratio = found["sarathi"] / found["vllm"] if found["vllm"] else None
            rows.append((model, data, name, found["vllm"], found["sarathi"], ratio, most))
    print_table(
        f"Sarathi-Serve over vLLM, {model} on {tensor} x A100: requests/s within the SLO",
        ("model", "lengths", "SLO", "vLLM", "Sarathi", "ratio", "published, up to"),
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-requests", type=int, default=100)
    parser.add_argument("--only", choices=["distserve", *(row[0] for row in SARATHI)])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.only in (None, "distserve"):
            distserve(Path(folder), args.num_requests)
        for setup in SARATHI:
            if args.only in (None, setup[0]):
                sarathi(Path(folder), args.num_requests, *setup)


if __name__ == "__main__":
    main()
