"""Compressed KV on the host: how long answers agree with those of full attention.

    python benchmarks/kv_compression.py [MODEL] [--compression shadow] [--dtype float32]

Prompts of random notes are answered greedily with full attention, and then with
less and less of the keys, and with fewer and fewer of the older tokens. What follows the first
token that differs answers another text, so it counts as differing.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

from host_kv import token_bytes
from table import print_table

from jaxserve import LLM, SamplingParams
from jaxserve.cli.bench.accuracy import agreement
from jaxserve.models.loading.fetch import default_model_path

NOTES, PROMPTS, TOKENS = 52, 3, 24
PAGE_SIZE, POOL, CHUNK = 16, 6, 64
WORDS = ["river", "teacher", "garden", "bridge", "market", "letter", "window", "doctor", "forest"]
VERBS = ["keeps", "finds", "sells", "repairs", "watches", "paints", "remembers", "measures"]
CITIES = ["Lisbon", "Oslo", "Prague", "Dublin", "Vienna", "Athens", "Warsaw", "Madrid", "Tallinn"]
SETTINGS: dict[str, tuple[tuple[str, str], list[tuple[int, int]]]] = {
    "shadow": (
        ("shadow_rank", "shadow_budget"),
        [(192, 1024), (128, 1024), (64, 1024), (192, 256), (192, 64), (64, 64)],
    ),
    "sparf": (
        ("sparf_components", "sparf_budget"),
        [(64, 1024), (16, 1024), (8, 1024), (64, 256), (64, 64), (8, 64)],
    ),
}
"""The settings, and their values from everything to little; SmolLM2's keys have 3 heads of 64."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, default=default_model_path())
    parser.add_argument("--compression", choices=SETTINGS, default="shadow")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    (kept, budget), values = SETTINGS[options.compression]
    expected = answers(options)
    rows = []
    for value in values:
        chosen = dict(zip((kept, budget), value)) | {"kv_compression": options.compression}
        if options.compression == "shadow":
            chosen["shadow_outliers"] = 4
        same, share = agreement(expected, answers(options, **chosen))
        rows.append((*value, f"{same} of {len(expected)}", f"{share:.0%}"))
    print_table(
        f"{options.compression}, {options.dtype}, {TOKENS} tokens after prompts of random notes.",
        (kept, budget, "same answers", "tokens before the first difference"),
        rows,
    )


def answers(options: argparse.Namespace, **changes: Any) -> list[tuple[int, ...]]:
    settings: dict[str, Any] = {
        "dtype": options.dtype,
        "max_model_len": 1024,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1 + CHUNK,
        "page_size": PAGE_SIZE,
        "kv_on": "host",
        **changes,
    }
    page_bytes = token_bytes(options.model, settings, PAGE_SIZE) * PAGE_SIZE
    with LLM(options.model, **settings, kv_cache_memory_bytes=(1 + POOL) * page_bytes) as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        outputs = llm.generate(prompts(), params, use_tqdm=False)
        return [tuple(output.outputs[0].token_ids) for output in outputs]


def prompts() -> list[str]:
    draw = random.Random(4)

    def note() -> str:
        who, what = draw.choice(WORDS), draw.choice(WORDS)
        return f"The {who} {draw.choice(VERBS)} a {what} near {draw.choice(CITIES)}."

    end = "A short summary of these notes: the garden"
    return [" ".join([*(note() for _ in range(NOTES)), end]) for _ in range(PROMPTS)]


if __name__ == "__main__":
    main()
