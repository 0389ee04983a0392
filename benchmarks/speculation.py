"""Tokens a second with n-gram speculation and without, and whether the tokens are the same.

    python benchmarks/speculation.py [MODEL] [--drafts 3] [--streams 1 8] [--tokens 128]

Two engines serve the same requests: prompts to copy from, tables to continue and questions, greedy
and seeded. Rounds of both engines alternate, and the best of each is reported. A pass is one step
of one stream: without speculation it gives one token.
"""

from __future__ import annotations

import argparse
import time

import jax
from table import print_table

from jaxserve import LLM, SamplingParams
from jaxserve.core.outputs import RequestOutput

ROUNDS = 3
TEXT = (
    "The lighthouse keeper climbed the stairs every evening at six. He lit the lamp, wiped the "
    "glass and wrote the weather into a grey book. On clear nights he could count the boats of the "
    "village, and he knew each of them by its light. When fog came in from the north he rang the "
    "bell, twice every minute, until the last boat had found the harbour."
)
ROWS = "".join(f"| item {i} | box {i} | shelf 4 | in stock |\n" for i in range(1, 9))
PROMPTS = {
    "copy a text": f"{TEXT}\n\nThe same text again:\n\n{TEXT[:60]}",
    "continue a table": f"| name | place | shelf | state |\n|---|---|---|---|\n{ROWS}",
    "questions": "Q: Why is the sky blue, and why are sunsets red?\nA:",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    named = {} if options.model is None else {"model": options.model}
    settings = {"max_num_seqs": max(options.streams), "max_model_len": 1024}
    drafted = {"method": "ngram", "num_speculative_tokens": options.drafts}
    with (
        LLM(**named, **settings) as plain,
        LLM(**named, **settings, speculative_config=drafted) as ngram,
    ):
        device = jax.devices()[0].device_kind
        rows = [
            measure(plain, ngram, kind, heat, streams, options.tokens)
            for streams in options.streams
            for heat in (0.0, 0.7)
            for kind in PROMPTS
        ]
    print_table(
        f"{options.drafts} drafts, {options.tokens} tokens a request, equal tokens, {device}",
        ["prompts", "sampling", "streams", "none, tok/s", "ngram, tok/s", "ratio", "tok/pass"],
        rows,
    )


def measure(
    plain: LLM, ngram: LLM, kind: str, heat: float, streams: int, tokens: int
) -> tuple[object, ...]:
    """A row of the table. Raises AssertionError when speculation changed a token."""
    prompts = [PROMPTS[kind]] * streams
    params = [
        SamplingParams(temperature=heat, seed=i, max_tokens=tokens, ignore_eos=True)
        for i in range(streams)
    ]
    best: dict[LLM, float] = {}
    answers: dict[LLM, list[RequestOutput]] = {}
    before = accepted(ngram)
    for _ in range(ROUNDS):
        for llm in (plain, ngram):
            begin = time.perf_counter()
            answers[llm] = llm.generate(prompts, params, use_tqdm=False)
            rate = streams * tokens / (time.perf_counter() - begin)
            best[llm] = max(best.get(llm, 0.0), rate)
    for one, other in zip(answers[plain], answers[ngram]):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids, kind
    ratio = best[ngram] / best[plain]
    share = (accepted(ngram) - before) / (ROUNDS * streams * tokens)
    sampling = f"temperature {heat}" if heat else "greedy"
    return kind, sampling, streams, best[plain], best[ngram], ratio, 1 / (1 - share)


def accepted(llm: LLM) -> int:
    """Draft tokens accepted so far."""
    return int(llm.get_metrics()["vllm:spec_decode_num_accepted_tokens_total"].value)


if __name__ == "__main__":
    main()
