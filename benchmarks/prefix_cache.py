"""Prompts with the same first 1,024 tokens: tokens computed and time to first token.

Runs the real engine on SmolLM2. Before a cold prompt the cache is cleared; a warm one finds the
prefix that the cold one cached. Rounds alternate between the two.

    python benchmarks/prefix_cache.py
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
from table import print_table

from jaxserve import LLM, SamplingParams

PREFIX_TOKENS = 1024
OWN_TOKENS = 32


def prefilled_tokens(llm: LLM) -> int:
    """Prompt tokens asked for so far, but for those found in the cache."""
    metrics = llm.get_metrics()
    queries, hits = (metrics[f"vllm:prefix_cache_{name}_total"] for name in ("queries", "hits"))
    return int(queries.value - hits.value)


def first_token(llm: LLM, prompt: list[int]) -> tuple[int, float]:
    """Prompt tokens computed for the first token of an answer, and milliseconds until it came."""
    before = prefilled_tokens(llm)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    times = output.metrics
    return prefilled_tokens(llm) - before, (times.first_token_us - times.arrival_us) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return rng.integers(1000, 49000, count).tolist()

    seen: dict[str, list[tuple[int, float]]] = {}
    with LLM() as llm:
        for _ in range(rounds):
            prefix = tokens(PREFIX_TOKENS)
            prompt = prefix + tokens(OWN_TOKENS)
            llm.reset_prefix_cache()
            for name, asked in (
                ("cold", prompt),
                ("warm, another question", prefix + tokens(OWN_TOKENS)),
                ("warm, the same prompt", prompt),
            ):
                seen.setdefault(name, []).append(first_token(llm, asked))
    medians = {name: tuple(map(statistics.median, zip(*runs))) for name, runs in seen.items()}
    cold_ms = medians["cold"][1]
    print_table(
        f"{PREFIX_TOKENS:,} tokens shared, {OWN_TOKENS} of its own, medians of {rounds} rounds",
        ("prefix", "prefill tokens computed", "TTFT ms", "warm / cold"),
        [(name, int(count), ms, ms / cold_ms) for name, (count, ms) in medians.items()],
    )


if __name__ == "__main__":
    main()
