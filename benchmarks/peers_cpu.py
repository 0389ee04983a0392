"""jaxserve against its peers on a CPU: same model, same prompts, same greedy tokens, one run.

Peers are Hugging Face `generate`, one request at a time and padded to a batch, its continuous
batching `generate_batch`, and llama.cpp where llama-cpp-python is installed. All but llama.cpp,
which multiplies the file's 4-bit weights, compute in float32. Rounds alternate between the engines
and the best of each is reported, so that other load on a shared machine does not penalize a single
engine. The limit is the time of the weights' matrix products alone, at rates measured here.

    pip install -e '.[peers]'
    python benchmarks/peers_cpu.py
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from table import print_table

from jaxserve import LLM, SamplingParams
from jaxserve.models.loading.fetch import default_model_path

NEW_TOKENS = 64


def workloads(vocab_size: int) -> dict[str, tuple[list[list[int]], int]]:
    """Name -> prompts and new tokens a prompt."""
    rng = np.random.default_rng(0)

    def prompt(length: int) -> list[int]:
        return rng.integers(1000, vocab_size, int(length)).tolist()

    return {
        "decode, one stream": ([prompt(32)], NEW_TOKENS),
        "prefill, 1,024 tokens": ([prompt(1024)], 1),
        "32 requests": ([prompt(length) for length in rng.integers(16, 257, 32)], NEW_TOKENS),
    }


class Ours:
    name = "jaxserve"

    def __init__(self) -> None:
        self.llm = LLM()

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        self.llm.reset_prefix_cache()  # or a second round would find the first one's pages
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class HuggingFace:
    """`generate` on one request, or on a batch padded on the left."""

    name = "HF generate"

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        path = default_model_path()
        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        torch, width = self.torch, max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        return out[:, width:].tolist()


class HuggingFaceContinuous:
    """`generate_batch`, transformers' continuous batching over paged KV."""

    name = "HF generate_batch"

    def __init__(self, padded: HuggingFace) -> None:
        self.model = padded.model

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        from transformers import GenerationConfig

        config = GenerationConfig(
            do_sample=False, max_new_tokens=new_tokens, eos_token_id=-1, pad_token_id=0
        )
        out = self.model.generate_batch(prompts, generation_config=config, progress_bar=False)
        ordered = sorted(out.values(), key=lambda o: int(o.request_id.rsplit("_", 1)[-1]))
        return [list(o.generated_tokens) for o in ordered]


class LlamaCpp:
    name = "llama.cpp (4-bit)"

    def __init__(self) -> None:
        from llama_cpp import Llama

        self.llama = Llama(str(default_model_path()), n_ctx=2048, n_batch=512, verbose=False)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        results = []
        for prompt in prompts:
            self.llama.reset()
            tokens = self.llama.generate(prompt, temp=0.0, top_k=1)
            results.append([next(tokens) for _ in range(new_tokens)])
        return results


def machine_limits() -> tuple[float, float]:
    """Multiply-adds a second of a large float32 product, bytes a second of a matrix-vector one."""
    square = jnp.ones((2048, 2048))
    wide = [jnp.ones((8192, 2048)) for _ in range(8)]  # half a gigabyte: beyond any cache
    product = jax.jit(lambda a: a @ a)
    vectors = jax.jit(lambda matrices, x: [matrix @ x for matrix in matrices])
    rate = 2048**3 / best_time(lambda: product(square).block_until_ready())
    seconds = best_time(lambda: jax.block_until_ready(vectors(wide, jnp.ones((2048, 1)))))
    return rate, sum(matrix.nbytes for matrix in wide) / seconds


def best_time(call: Callable[[], object], rounds: int = 5) -> float:
    call()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def limit_seconds(llm: LLM, prompts: list[list[int]], new_tokens: int) -> float:
    """Least time for a workload's weight products, all prompts first and then full batches."""
    rate, bandwidth = machine_limits()
    params = llm.plan().shapes.params.abstract
    in_layers = sum(leaf.size for leaf in jax.tree.leaves(params["layers"]))
    head = params["embed"].size
    rows, tokens = len(prompts), sum(map(len, prompts))
    prefill = (tokens * in_layers + rows * head) / rate
    step = max(rows * (in_layers + head) / rate, 4 * (in_layers + head) / bandwidth)
    return prefill + (new_tokens - 1) * step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    ours, padded = Ours(), HuggingFace()
    engines = [ours, padded, HuggingFaceContinuous(padded)]
    if importlib.util.find_spec("llama_cpp"):
        engines.append(LlamaCpp())
    rows = []
    vocab_size = ours.llm.plan().shapes.model.vocab_size
    for workload, (prompts, new_tokens) in workloads(vocab_size).items():
        alone = len(prompts) == 1
        taking_part = [e for e in engines if not (alone and isinstance(e, HuggingFaceContinuous))]
        best: dict[str, float] = {}
        answers = {}
        for _ in range(rounds):
            for engine in taking_part:
                gc.collect()
                begin = time.perf_counter()
                answers[engine.name] = engine.generate(prompts, new_tokens)
                seconds = time.perf_counter() - begin
                best[engine.name] = min(seconds, best.get(engine.name, seconds))
                print(f"{workload}: {engine.name} {seconds:.2f} s", file=sys.stderr, flush=True)
        limit = limit_seconds(ours.llm, prompts, new_tokens)
        counted = len(prompts[0]) if new_tokens == 1 else len(prompts) * new_tokens
        for name, seconds in (*best.items(), ("limit", limit)):
            same = "" if name == "limit" else agreement(answers[name], answers[ours.name])
            rows.append(
                (
                    workload,
                    name,
                    f"{counted / seconds:.1f}",
                    f"{seconds / best[ours.name]:.2f}",
                    same,
                )
            )
    columns = ("workload", "engine", "tokens/s", "jaxserve is x faster", "same tokens")
    print_table(f"SmolLM2-135M-Instruct, greedy, {os.cpu_count()} cores", columns, rows)


def agreement(theirs: list[list[int]], ours: list[list[int]]) -> str:
    """Share of the requests whose tokens are the same throughout."""
    same = sum(a == b for a, b in zip(theirs, ours, strict=True))
    return f"{same} of {len(ours)}"


if __name__ == "__main__":
    main()
