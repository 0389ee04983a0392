"""Prompts that a chat model writes itself, as its users would (Magpie; Xu et al. 2024, 2406.08464):
it continues its chat template at the point where the user's message begins."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from pathlib import Path

from jaxserve.core.errors import ConfigError
from jaxserve.llm import LLM
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.models.loading.params import Progress
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.training.targets import NUM_STREAMS

_MAX_TOKENS = 64
_TRIES = 8
"""Texts that are sampled for each prompt at most: some do not end, or come twice."""


def write_prompts(model: str | Path | None, count: int, path: Path, progress: Progress) -> None:
    """Has `model` write `count` different prompts to the JSONL file `path`, the same ones each
    time. Does nothing where they are there.

    Raises ConfigError for a model without a chat template, or that seldom ends a user's words.
    """
    if path.exists() and len(path.read_text(encoding="utf-8").splitlines()) == count:
        return
    opening, texts = _opening(open_checkpoint(model).tokenizer()), dict[str, None]()
    streams = min(NUM_STREAMS, count)
    with LLM(model, max_num_seqs=streams) as llm:
        params = llm.default_sampling_params(temperature=1.0, max_tokens=_MAX_TOKENS)
        for first in range(0, _TRIES * count, 2 * streams):
            seeds = range(first, first + 2 * streams)
            sampled = llm.generate(
                [{"prompt_token_ids": opening}] * len(seeds),
                [dataclasses.replace(params, seed=seed) for seed in seeds],
                use_tqdm=False,
            )
            for completion in (output.outputs[0] for output in sampled):
                if completion.finish_reason == "stop" and completion.text.strip():
                    texts[completion.text.strip()] = None
            progress(min(len(texts), count), count)
            if len(texts) >= count:
                break
    if len(texts) < count:
        raise ConfigError(
            f"num_prompts is {count}, but the model ended only {len(texts)} different prompts; "
            "give fewer, or a file of prompts as data."
        )
    records = ({"messages": [{"role": "user", "content": text}]} for text in [*texts][:count])
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".part")
    whole.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    os.replace(whole, path)


def _opening(tokenizer: Tokenizer) -> list[int]:
    """Token ids of a conversation up to the user's message. Raises ConfigError without a template,
    or with one that has nothing before that."""
    if tokenizer.chat_template is None:
        raise ConfigError(
            "the model has no chat template, so it cannot write prompts itself; give a file of "
            "prompts as data."
        )
    both = (tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("Who", "7"))
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*both))
    opening = [token for token, _ in same]
    if not opening:
        raise ConfigError(
            "the model's chat template has nothing before the user's message, so it cannot write "
            "prompts itself; give a file of prompts as data."
        )
    return opening
