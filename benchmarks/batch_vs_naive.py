"""A batch job against a loop of single calls over the same prompts, in one run.

The prompts are questions about a few documents, 1 in 8 about each, in mixed order, as in evaluation
sets. The job runs them as `jaxserve batch` does: many concurrently, those about one document
together, the results in a file. The loop runs them one by one on the same engine. Both begin with
an empty prefix cache, which the loop uses too.

    python benchmarks/batch_vs_naive.py --prompts 64
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path

from table import print_table

from jaxserve import LLM, SamplingParams
from jaxserve.offline import run_batch

DOCUMENTS = 8
DOCUMENT_TOKENS = 256
QUESTION_TOKENS = 32


def prompts_of(count: int, vocab_size: int) -> list[list[int]]:
    """Token ids: a document, which others have too, and a question of its own."""
    draw = random.Random(0)

    def tokens(length: int) -> list[int]:
        return [draw.randrange(1000, vocab_size - 1000) for _ in range(length)]

    documents = [tokens(DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    return [draw.choice(documents) + tokens(QUESTION_TOKENS) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_args()
    params = {"temperature": 0.0, "max_tokens": options.max_tokens, "ignore_eos": True}
    with LLM() as llm, tempfile.TemporaryDirectory() as directory:
        prompts = prompts_of(options.prompts, llm.plan().shapes.model.vocab_size)
        lines, output = Path(directory) / "in.jsonl", Path(directory) / "out.jsonl"
        lines.write_text("".join(json.dumps({"prompt": p, **params}) + "\n" for p in prompts))

        begin = time.monotonic()
        run = run_batch(llm, lines, output)
        batch_s = time.monotonic() - begin
        assert run.totals.num_output_tokens == options.prompts * options.max_tokens

        llm.reset_prefix_cache()
        begin = time.monotonic()
        for prompt in prompts:
            llm.generate(prompt, SamplingParams(**params), use_tqdm=False)
        loop_s = time.monotonic() - begin

    tokens = run.totals.num_prompt_tokens + run.totals.num_output_tokens
    print_table(
        f"{options.prompts} prompts of {DOCUMENT_TOKENS + QUESTION_TOKENS} tokens about "
        f"{DOCUMENTS} documents, {options.max_tokens} tokens each",
        ("", "seconds", "tokens/s", "loop / this"),
        [
            ("loop of single calls", loop_s, tokens / loop_s, 1.0),
            ("batch job", batch_s, tokens / batch_s, loop_s / batch_s),
        ],
    )


if __name__ == "__main__":
    main()
