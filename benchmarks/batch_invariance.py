"""Cost of `batch_invariant=True`, and how often outputs differ without it, in one run.

    python benchmarks/batch_invariance.py [MODEL] [--dtype float32] [--requests 12]

Two engines serve the same requests, each alone and then all together: greedy ones, and seeded ones
at temperature 1. Counts requests whose tokens, and whose logprobs bit for bit, are the same both
times. Times are of one long prompt, of one decode stream and of all requests decoding together;
rounds of both engines alternate, and the best of each is reported.
"""

from __future__ import annotations

import argparse
import time

import jax
from table import print_table

from jaxserve import LLM, SamplingParams

ROUNDS = 3
TOKENS = 48
LONG_PROMPT = 512
OPENINGS = (
    "The capital of France is",
    "1, 2, 3,",
    "Once upon a time there was a little girl who",
    "Write a poem about the sea.\n",
    "def fib(n):",
    "The theory of relativity says",
    "My favourite food is",
    "In 1969,",
    "Q: What is 2 + 2? A:",
    "The sun rises in the",
    "A long time ago in a galaxy",
    "import numpy as np\n",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=12)
    options = parser.parse_args()
    named = {} if options.model is None else {"model": options.model}
    settings = {
        "dtype": options.dtype,
        "max_model_len": LONG_PROMPT + 64,
        "max_num_seqs": options.requests,
        "max_num_batched_tokens": options.requests + 256,
    }
    with (
        LLM(**named, **settings) as plain,
        LLM(**named, **settings, batch_invariant=True) as invariant,
    ):
        engines = {"default": plain, "batch_invariant": invariant}
        print(f"{options.requests} requests of {TOKENS} tokens, {options.dtype}, on", end=" ")
        print(f"{jax.devices()[0].device_kind}\n")
        agreement(engines, options.requests)
        print()
        cost(engines, options.requests)


def agreement(engines: dict[str, LLM], count: int) -> None:
    """Requests that are the same alone and together."""
    prompts = [OPENINGS[i % len(OPENINGS)] + " and" * (i // len(OPENINGS)) for i in range(count)]
    common = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 1}
    kinds = {
        "greedy": [SamplingParams(temperature=0, **common)] * count,
        "seeded": [SamplingParams(temperature=1, seed=i, **common) for i in range(count)],
        "seeded, top_p 0.9": [
            SamplingParams(temperature=1, top_p=0.9, seed=i, **common) for i in range(count)
        ],
    }
    rows = []
    for kind, params in kinds.items():
        cells = []
        for llm in engines.values():
            alone = []
            for prompt, own in zip(prompts, params):
                llm.reset_prefix_cache()
                alone += llm.generate(prompt, own, use_tqdm=False)
            llm.reset_prefix_cache()
            together = llm.generate(prompts, params, use_tqdm=False)
            pairs = [(a.outputs[0], b.outputs[0]) for a, b in zip(alone, together)]
            tokens = sum(a.token_ids == b.token_ids for a, b in pairs)
            bits = sum(a.logprobs == b.logprobs for a, b in pairs)
            cells.append(f"{tokens}, {bits} of {count}")
        rows.append((kind, *cells))
    columns = ("alone and together", *(f"{name}: tokens, bits" for name in engines))
    print_table("Requests that are the same", columns, rows)


def cost(engines: dict[str, LLM], count: int) -> None:
    """Tokens a second of both, and their ratio."""
    ids = list(range(1000, 1000 + LONG_PROMPT))
    decode = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    first = SamplingParams(temperature=0, max_tokens=1)
    cases = {
        f"prefill of {LONG_PROMPT} tokens": ([ids], first, LONG_PROMPT),
        "decode, one stream": ([ids[:8]], decode, TOKENS),
        f"decode, {count} streams": (
            [ids[i : i + 8] for i in range(count)],
            decode,
            count * TOKENS,
        ),
    }
    rows = []
    for name, (prompts, params, tokens) in cases.items():
        best = dict.fromkeys(engines, 0.0)
        for _ in range(ROUNDS):
            for engine, llm in engines.items():
                llm.reset_prefix_cache()
                requests = [{"prompt_token_ids": prompt} for prompt in prompts]
                begin = time.perf_counter()
                llm.generate(requests, params, use_tqdm=False)
                best[engine] = max(best[engine], tokens / (time.perf_counter() - begin))
        ratio = best["batch_invariant"] / best["default"]
        rows.append((name, *best.values(), ratio))
    print_table("Tokens a second", ("tokens/s", *engines, "ratio"), rows)


if __name__ == "__main__":
    main()
