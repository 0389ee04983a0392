"""Capacity ratios that papers report, beside those of simulations on the same devices and models.

DistServe (Zhong et al. 2024, figure 1): OPT-13B, here a LLaMA of as many weights, on an A100,
prompts of 512 and outputs of 64 tokens, P90 TTFT within 0.4 s and P90 TPOT within 0.04 s. By the
data sheet first; then with the shares of its peaks that make prefill and decode alone as fast as
reported, so that an engine that has both to do is predicted.

Sarathi-Serve (Agrawal et al. 2024, sections 5.1 and 5.2): Mistral-7B on an A100, and Yi-34B on two,
by the data sheet; P99 of times between tokens, strict and relaxed, and at most 2 s for the median
scheduling delay. Lengths are drawn by the medians and 90th percentiles of its two data sets, or are
those of a file.

Vidur (Agrawal et al. 2024, section 7.3): LLaMA2-70B on 16 GPUs, A100s or H100s, chunks of 512
tokens, for three data sets: the deployment with the most requests per dollar, and what that of one
data set costs with the requests of another.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import itertools
import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from table import print_table

from jaxserve.cli.planning.described import Described
from jaxserve.core.errors import MemoryPlanError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.simulator.deployments.capacity import Load, rate_at
from jaxserve.simulator.deployments.phases import (
    decode_only,
    goodput,
    goodput_by_role,
    prefill_only,
)
from jaxserve.simulator.deployments.placement import EngineGoodput, best_placement
from jaxserve.simulator.deployments.search import Candidate, EngineUnderLoad, Processes, outcomes
from jaxserve.simulator.deployments.slo import Slo
from jaxserve.simulator.simulation import Arrival

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
    "LLaMA2-70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
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
    "Chat-1M": ((417, 1678), (139, 484), 4096),
    "Arxiv-4K": ((2730, 3702), (167, 372), 4096),
    "BWB-4K": ((1037, 1453), (1601, 2149), 4096),
}
"""Median and 90th percentile of prompts and of outputs, and the longest sequence."""
PREFILL, DECODE, BOTH = 5.6, 10.0, 1.6
"""Requests/s that DistServe reports of one A100."""
ROUNDS = 7
SARATHI = {
    # Devices that split a layer, and limits of times between tokens in seconds with the budgets of
    # steps: strict and relaxed.
    "Mistral-7B": (1, {"strict": (0.1, 512), "relaxed": (0.5, 2048)}),
    "Yi-34B": (2, {"strict": (0.2, 512), "relaxed": (1.0, 2048)}),
}
SARATHI_RATIOS = {
    ("Mistral-7B", "openchat", "strict"): 2.6,  # "up to" in the abstract.
    ("Yi-34B", "openchat", "strict"): 3.7,
    ("Yi-34B", "openchat", "relaxed"): 1.65,
}
"""Capacities over vLLM's that the text states; the others are bars of a figure."""
VIDUR_GPUS, PRICES = 16, {"a100": 2.21, "h100": 4.25}
VIDUR_BEST = {
    "Chat-1M": "h100, TP2 PP2, 256 sequences",
    "Arxiv-4K": None,
    "BWB-4K": "a100, 64 sequences",
}
"""What the text and figure 5 state."""


def described(folder: Path, model: str, device: str = "a100", **settings: Any) -> Described:
    path = folder / model
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(LLAMA | MODELS[model]))
    config = EngineConfig(str(path), dtype="bfloat16", **settings)
    return Described.of(config, device, None, propose=False)


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

    def engine(scheduler: str, **shares: float) -> EngineUnderLoad:
        plan = plans[scheduler]
        plan = dataclasses.replace(plan, spec=dataclasses.replace(plan.spec, **shares))
        return EngineUnderLoad(plan.deployment, plan.times, requests)

    def by_role(scheduler: str, **shares: float) -> EngineGoodput:
        one = engine(scheduler, **shares)
        return goodput_by_role(one.deployment, one.times, requests, slo)

    def fitted(
        reported: float,
        role: Callable[[EngineUnderLoad], EngineUnderLoad],
        name: str,
        **known: float,
    ):
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


def sarathi(folder: Path, count: int, model: str, openchat: Path | None) -> None:
    tensor, limits = SARATHI[model]
    rows = []
    for data in ("openchat", "arxiv"):
        longest = LENGTHS[data][2]
        own = data == "openchat" and openchat is not None
        requests = load(of_file(openchat) if own else drawn(data), count)
        for name, (limit, budget) in limits.items():
            slo = Slo.of(f"itl_p99={limit}s,queue_p50=2s")
            found = {}
            for scheduler in ("vllm", "sarathi"):
                plan = described(
                    folder,
                    model,
                    scheduler=scheduler,
                    tensor_parallel_size=tensor,
                    max_num_seqs=128,
                    max_num_batched_tokens=128 + (longest if scheduler == "vllm" else budget),
                    max_model_len=longest,
                )
                engine = EngineUnderLoad(plan.deployment, plan.times, requests)
                found[scheduler] = goodput(engine, slo)
            ratio = found["sarathi"] / found["vllm"] if found["vllm"] else None
            published = SARATHI_RATIOS.get((model, data, name))
            off = 100 * (ratio / published - 1) if ratio and published else None
            rows.append((data, name, found["vllm"], found["sarathi"], ratio, published, off))
    print_table(
        f"Sarathi-Serve over vLLM, {model} on {tensor} x A100: requests/s within the SLO",
        ("lengths", "SLO", "vLLM", "Sarathi", "ratio", "published", "difference %"),
        rows,
    )


def of_file(path: Path) -> Iterator[tuple[int, int]]:
    """The lengths of a CSV file with Vidur's columns, in an order drawn from a seed."""
    with path.open() as lines:
        rows = list(csv.DictReader(lines))
    random.Random(1).shuffle(rows)
    return ((int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])) for row in rows)


def vidur(folder: Path, count: int, lengths: Sequence[str]) -> None:
    """The most requests per dollar of each kind of GPU, and what the best deployment of one data
    set costs with the requests of another."""
    slo = Slo.of("ttft_p90=2s,itl_p99=200ms,queue_p99=5s")
    plans = {device: vidur_plans(folder, device) for device in PRICES}
    loads = {data: load(drawn(data), count) for data in lengths}
    engines = {
        data: {device: vidur_engines(plans[device], loads[data]) for device in PRICES}
        for data in lengths
    }

    def per_dollar(device: str, step: int) -> float:
        return rate_at(step, 1.0) / PRICES[device] / VIDUR_GPUS

    best: dict[str, tuple[str, str]] = {}
    own: dict[str, float] = {}
    rows = []
    for data, of_data in engines.items():
        found = {
            device: (name, per_dollar(device, step))
            for device in PRICES
            if (most := most_capacity(of_data[device], slo)) is not None
            for name, step in [most]
        }
        chosen = max(found, key=lambda device: found[device][1])
        best[data], own[data] = (chosen, found[chosen][0]), found[chosen][1]
        for device, (name, value) in found.items():
            mark = "best" if device == chosen else ""
            rows.append((data, device, name, value, mark, VIDUR_BEST[data]))
    print_table(
        f"Vidur's search: LLaMA2-70B on {VIDUR_GPUS} GPUs, requests/s per dollar an hour",
        ("lengths", "GPU", "best of it", "requests/s per $", "", "published"),
        rows,
    )
    rows = []
    for data in best:
        costs = []
        for device, name in best.values():
            engine = engines[data][device][name]
            step = engine.capacity(slo, None, engine.bounds(slo).last_step).step
            costs.append(None if step is None else own[data] / per_dollar(device, step))
        rows.append((data, *costs))
    print()
    print_table(
        "What requests cost with the best deployment of others, over their own "
        "(published: 2 for Chat-1M with that of Arxiv-4K)",
        ("lengths", *(f"best of {data}" for data in best)),
        rows,
    )


def most_capacity(engines: dict[str, EngineUnderLoad], slo: Slo) -> tuple[str, int] | None:
    """The deployment of one kind of GPUs with the most capacity, and its step."""
    names = list(engines)
    candidates = [Candidate(1.0, engines[name].bounds(slo)) for name in names]
    with Processes(slo, 1) as processes:
        found = dict(
            outcomes(
                candidates,
                lambda number, above, last: processes.submit(engines[names[number]], above, last),
                slo,
                ahead=1,
            )
        )
    steps = {
        names[number]: outcome.step for number, outcome in found.items() if outcome.step is not None
    }
    return max(steps.items(), key=lambda item: item[1], default=None)


def vidur_plans(folder: Path, device: str) -> dict[str, Described]:
    """One engine of each deployment that fits, by its name."""
    plans = {}
    for tensor, stages, seqs in itertools.product((1, 2, 4), (1, 2, 4), (64, 128, 256)):
        with contextlib.suppress(MemoryPlanError):
            plans[f"TP{tensor} PP{stages}, {seqs} sequences"] = described(
                folder,
                "LLaMA2-70B",
                device,
                scheduler="sarathi",
                tensor_parallel_size=tensor,
                pipeline_parallel_size=stages,
                max_num_seqs=seqs,
                max_num_batched_tokens=seqs + 512,
                max_model_len=4096,
            )
    return plans


def vidur_engines(plans: dict[str, Described], requests: Load) -> dict[str, EngineUnderLoad]:
    """The engines, each with its share of a load of 1 request a second."""
    engines = {}
    for name, plan in plans.items():
        replicas = VIDUR_GPUS // plan.plan.config.num_devices
        arrivals = [
            dataclasses.replace(arrival, time_us=arrival.time_us * replicas)
            for arrival in requests.arrivals
        ]
        engines[name] = EngineUnderLoad(plan.deployment, plan.times, Load(arrivals, 1 / replicas))
    return engines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-requests", type=int, default=100)
    parser.add_argument("--only", choices=["distserve", *SARATHI, "vidur"])
    parser.add_argument("--openchat", type=Path, help="a CSV file with Vidur's columns of lengths")
    parser.add_argument("--vidur-lengths", nargs="+", choices=VIDUR_BEST, default=[*VIDUR_BEST])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if args.only in (None, "distserve"):
            distserve(Path(folder), args.num_requests)
        for model in SARATHI:
            if args.only in (None, model):
                sarathi(Path(folder), args.num_requests, model, args.openchat)
        if args.only in (None, "vidur"):
            vidur(Path(folder), args.num_requests, args.vidur_lengths)


if __name__ == "__main__":
    main()
