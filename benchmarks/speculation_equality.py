"""How many answers are the same with speculation as without it, for each method.

    python benchmarks/speculation_equality.py [MODEL] [--drafter JSON ...] [--dtype DTYPE]
                                              [--tokens 40] [--batch-invariant]

One engine after the other serves the same 24 requests, all of them together: 12 prompts, each
greedy and with a seed at temperature 1. The first engine has no speculation, the others have the
drafters given (a `speculative_config` each; by default those that need no trained weights, of which
a draft model is the model itself). Counts the answers whose tokens differ from the first engine's
and those whose log probabilities are bit for bit the same, and prints the tokens that a step
decodes of a request. The first row of the table is the first engine once more, with the requests
one at a time: sums of another number of rows may have another order, with drafts or without.
"""

from __future__ import annotations

import argparse
import json

import jax
from batch_invariance import OPENINGS
from table import print_table

from jaxserve import LLM, SamplingParams
from jaxserve.core.requests.outputs import RequestOutput
from jaxserve.core.settings.speculative import SpeculativeConfig

DRAFTERS = (
    {"method": "ngram", "num_speculative_tokens": 3},
    {"method": "draft_model", "num_speculative_tokens": 3},
    {"method": "layer_skip", "num_layers": 24, "num_speculative_tokens": 3},
    {"method": "layer_skip", "num_layers": 24, "num_speculative_tokens": "auto"},
    {"method": "jacobi", "num_speculative_tokens": 3},
    {"method": "lookahead", "num_speculative_tokens": 3},
)
HEATS = (0.0, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--drafter", type=json.loads, nargs="+", default=DRAFTERS)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--dtype", help="of weights, activations and KV")
    parser.add_argument("--batch-invariant", action="store_true")
    options = parser.parse_args()
    settings = {
        "max_num_seqs": len(OPENINGS) * len(HEATS),
        "max_model_len": 128,
        "max_num_batched_tokens": 512,
        "dtype": options.dtype,
        "batch_invariant": options.batch_invariant,
    }
    if options.model is not None:
        settings["model"] = options.model
    params = [
        SamplingParams(
            temperature=heat, seed=i, max_tokens=options.tokens, ignore_eos=True, logprobs=0
        )
        for heat in HEATS
        for i in range(len(OPENINGS))
    ]
    prompts = list(OPENINGS) * len(HEATS)
    with LLM(**settings) as llm:
        dtype = llm.engine.plan.config.dtype
        expected = llm.generate(prompts, params, use_tqdm=False)
        alone = [
            llm.generate(prompt, each, use_tqdm=False)[0] for prompt, each in zip(prompts, params)
        ]
    rows = [("none, one request at a time", *compared(alone, expected), 1.0)]
    for config in options.drafter:
        if config.get("method") == "draft_model" and "model" not in config:
            config = {**config, "model": options.model or "smollm2-135m-instruct"}
        with LLM(**settings, speculative_config=config) as llm:
            answers = llm.generate(prompts, params, use_tqdm=False)
            metrics = llm.get_metrics()
            rows.append((name(config), *compared(answers, expected), mean_length(metrics)))
            print(*rows[-1], sep=", ", flush=True)
    columns = ["drafts", "greedy, differ", "seeded, differ", "bit for bit", "tokens a step"]
    what = f"{len(OPENINGS)} prompts, greedy and seeded, {options.tokens} tokens each"
    invariant = ", batch_invariant" if options.batch_invariant else ""
    print_table(f"{what}, {dtype}{invariant}, {jax.devices()[0].device_kind}", columns, rows)


def compared(answers: list[RequestOutput], expected: list[RequestOutput]) -> tuple[str, str, str]:
    """Greedy and seeded answers that differ, and answers with equal log probabilities."""
    differs = [
        one.outputs[0].token_ids != other.outputs[0].token_ids
        for one, other in zip(answers, expected)
    ]
    equal = sum(
        one.outputs[0].logprobs == other.outputs[0].logprobs
        for one, other in zip(answers, expected)
    )
    half = len(differs) // 2
    greedy, seeded = sum(differs[:half]), sum(differs[half:])
    return f"{greedy} of {half}", f"{seeded} of {half}", f"{equal} of {2 * half}"


def mean_length(metrics: dict) -> float:
    """Tokens that a step with drafts decodes of a request."""
    drafts = metrics["vllm:spec_decode_num_drafts_total"].value
    return 1 + metrics["vllm:spec_decode_num_accepted_tokens_total"].value / max(drafts, 1)


def name(config: dict) -> str:
    """The method, the number of its drafts, and whether they are a tree."""
    tree = {"speculative_token_tree", "top_k", "depth"} & config.keys()
    drafts = SpeculativeConfig.of(config)
    return f"{drafts.method}, {drafts.num_speculative_tokens}{', tree' if tree else ''}"


if __name__ == "__main__":
    main()
