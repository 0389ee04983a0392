"""HTTP overhead: the same requests by `LLM.generate`, and by connections to `jaxserve serve`.

Both have an engine with equal settings, in separate processes, of which one works at a time. Rounds
alternate, and the best is reported: other work on the machine only slows a round down. A stream is
an event per token, and this process, which reads them all, shares the same cores.

    python benchmarks/serve_overhead.py
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from served import complete_all, served
from table import print_table

from jaxserve import LLM, SamplingParams

SEQS = 32
CONTEXT = 512
BUDGET = 160


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="generated for each request")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    lengths = rng.integers(16, 257, args.requests)
    prompts = [rng.integers(1000, 49000, length).tolist() for length in lengths]
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    params = {"temperature": 0, "max_tokens": args.tokens, "ignore_eos": True}
    bodies = [{"prompt": prompt, **params} for prompt in prompts]
    streams = [body | {"stream": True} for body in bodies]
    settings = {"max_num_seqs": SEQS, "max_model_len": CONTEXT, "max_num_batched_tokens": BUDGET}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]

    with (
        LLM(args.model, **settings, enable_prefix_caching=False) as llm,
        served(args.model, *options, "--no-enable-prefix-caching") as url,
    ):
        ways = {
            "LLM.generate": lambda: [
                o.outputs[0].text for o in llm.generate(prompts, params, False)
            ],
            "HTTP": lambda: complete_all(url, bodies),
            "HTTP, streamed": lambda: complete_all(url, streams),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(args.turns):
            texts = []
            for way, run in ways.items():
                begin = time.monotonic()
                texts.append(run())
                seconds[way].append(time.monotonic() - begin)
            if not texts[0] == texts[1] == texts[2]:
                raise SystemExit("the answers differ")
    best = {way: min(times) for way, times in seconds.items()}
    tokens = args.requests * args.tokens
    print_table(
        f"{args.requests} requests of 16 to 256 tokens, {args.tokens} new each, {SEQS} at once",
        ("", "seconds", "tokens/s", "of LLM.generate"),
        [
            (
                way,
                took,
                tokens / took,
                f"{best['LLM.generate'] / took:.2f}x",
            )
            for way, took in best.items()
        ],
    )


if __name__ == "__main__":
    main()
