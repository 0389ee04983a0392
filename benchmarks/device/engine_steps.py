"""The engine itself at a model's size, with random weights: its own programs, steps and tokens."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scale import MODELS
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from jaxserve import LLM, SamplingParams

MODEL = "Llama-3.1-8B"
BATCHES = (1, 8, 64, 256)
CONTEXT, NEW_TOKENS = 1024, 128
SAMPLERS = {
    "greedy": {"temperature": 0.0},
    "top-p": {"temperature": 1.0, "top_p": 0.9, "seed": 0},
}


def tasks() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """A key, and what measures it, for every batch."""
    for batch in BATCHES:
        yield f"engine, {MODEL}, batch {batch}", functools.partial(measured, batch)


def measured(batch: int) -> dict[str, Any]:
    """Seconds until the engine is ready and, by sampler, tokens a second of `batch` sequences that
    all decode, and milliseconds of a step."""
    found: dict[str, Any] = {"tokens_s": {}, "step_ms": {}}
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory), MODELS[MODEL])
        begin = time.monotonic()
        with LLM(
            directory,
            load_format="dummy",
            max_model_len=CONTEXT + 2 * NEW_TOKENS,
            max_num_seqs=batch,
            max_num_batched_tokens=2048 + batch,
            enable_prefix_caching=False,
        ) as llm:
            found["ready_s"] = time.monotonic() - begin
            for name, sampler in SAMPLERS.items():
                params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, **sampler)
                step_s = decode_step_s(llm, batch, params)
                found["tokens_s"][name] = batch / step_s
                found["step_ms"][name] = 1e3 * step_s
    return found


def decode_step_s(llm: LLM, batch: int, params: SamplingParams) -> float:
    """Median seconds of a step in which all of a batch decode."""
    rng, engine, times = np.random.default_rng(0), llm.engine, []
    for number in range(batch):
        engine.add(str(number), rng.integers(1000, 100_000, CONTEXT).tolist(), params)
    while engine.has_work:
        begin = time.perf_counter()
        touched = engine.step()
        if len(touched) == batch:
            times.append(time.perf_counter() - begin)
    return float(np.median(times[batch > 1 :]))


def write_model(directory: Path, config: dict[str, Any]) -> None:
    """A config to make random weights of, and a tokenizer that only token ids get past."""
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(directory / "tokenizer.json"))
