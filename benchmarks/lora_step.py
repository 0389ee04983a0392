"""Step times with several LoRA adapters in a batch, against those of an engine without adapters.

    python benchmarks/lora_step.py [MODEL] [--adapters 4] [--rank 8] [--requests 32] [--rounds 5]

Two engines decode the same requests, one with `enable_lora`: without adapters, then with a
different one for each request in turn. The adapters are random and change every linear layer.
Rounds alternate; the median step of each is reported, and its ratio to that of the plain engine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file
from table import print_table

from jaxserve import LLM, LoRARequest, SamplingParams
from jaxserve.core.model_config import ModelConfig
from jaxserve.models.lora import A, B, modules_of
from jaxserve.models.registry import param_specs

PROMPT = 8
STEPS = 12
"""Of a round, after two that are not counted."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    settings = {
        "max_model_len": 64,
        "max_num_seqs": options.requests,
        "max_num_batched_tokens": 2 * options.requests,
        "enable_prefix_caching": False,
    }
    if options.model is not None:
        settings["model"] = options.model
    lora = {"enable_lora": True, "max_loras": options.adapters, "max_lora_rank": options.rank}
    with tempfile.TemporaryDirectory() as scratch, LLM(**settings) as plain:
        adapters = [
            write_adapter(Path(scratch, str(seed)), plain.model_config, options.rank, seed)
            for seed in range(options.adapters)
        ]
        with LLM(**settings, **lora) as adapted:
            for adapter in adapters:
                adapted.add_lora(adapter)
            report(plain, adapted, adapters, options)


def report(
    plain: LLM, adapted: LLM, adapters: list[LoRARequest], options: argparse.Namespace
) -> None:
    """The median step of each case."""
    count = options.requests
    mixed = [adapters[place % len(adapters)] for place in range(count)]
    cases = {
        "without enable_lora": (plain, [None] * count),
        "enable_lora, no adapter": (adapted, [None] * count),
        f"{len(adapters)} adapters of rank {options.rank}": (adapted, mixed),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, case in cases.items():
            times[name] += step_times(*case)
    medians = {name: 1e3 * statistics.median(taken) for name, taken in times.items()}
    base = medians["without enable_lora"]
    device, dtype = jax.devices()[0].device_kind, plain.plan().config.dtype
    rows = [(name, median, median / base) for name, median in medians.items()]
    title = f"Decode steps of {count} requests, {dtype}, {device}"
    print_table(title, ("adapters", "ms a step", "ratio"), rows)


def step_times(llm: LLM, adapters: list[LoRARequest | None]) -> list[float]:
    """Seconds of each of STEPS steps in which all requests decode."""
    engine = llm.engine
    params = SamplingParams(temperature=0, max_tokens=STEPS + 16, ignore_eos=True)
    names = [f"step-{place}" for place in range(len(adapters))]
    requests = [
        engine.add(name, [100 + place] * PROMPT, params, lora_request=adapter)
        for place, (name, adapter) in enumerate(zip(names, adapters))
    ]
    while not all(request.sequence_outputs[0].seq.output_token_ids for request in requests):
        engine.step()
    times = []
    for _ in range(STEPS + 2):
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    for name in names:
        engine.abort(name)
    while engine.has_work:
        engine.step()
    return times[2:]


def write_adapter(directory: Path, model: ModelConfig, rank: int, seed: int) -> LoRARequest:
    """A random adapter for every linear layer of a model, as PEFT would write it."""
    rng, tensors = np.random.default_rng(seed), {}
    for module, (outputs, inputs) in modules_of(param_specs(model)).items():
        name = f"base_model.model.{module}"
        tensors[name + A] = rng.normal(0, 0.02, (rank, inputs)).astype(np.float32)
        tensors[name + B] = rng.normal(0, 0.02, (outputs, rank)).astype(np.float32)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return LoRARequest(f"adapter-{seed}", str(directory))


if __name__ == "__main__":
    main()
