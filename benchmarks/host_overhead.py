"""CPU time of the host per token: planning, packing, calling programs, reading, text.

Runs the real engine on a model of one small layer with SmolLM2's tokenizer, all sequences decoding,
with text, stop strings and end-of-sequence rules on. The parts are the methods
that a step calls, timed by the CPU time of the engine's thread, so that neither other work on the
machine nor waiting for the device counts. The median is over steps in which every sequence decodes,
in a second run of the same requests, because a tokenizer decodes each token once. Text is a part of
collecting: the same tokens are pushed through new detokenizers afterwards.

On CPUs, calling a small program can mean running it in the calling thread, and reading its results
means waiting, sometimes busily. Both, "dispatch" and "read", are therefore excluded from "host",
which is the rest of a step.

The model has the first tokens of the vocabulary, and then all of them. An accelerator has a step's
logits in its own memory; on a CPU those of 256 rows and 49,152 tokens, 50 MB, displace all that the
host has in its caches, in every step. The first columns are nearer to what a host does for an
accelerator.

    python benchmarks/host_overhead.py
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from table import print_table

from jaxserve import LLM, SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.models.loading.checkpoint import open_checkpoint
from jaxserve.text import Detokenizer, Tokenizer

PROMPT_TOKENS = 16, 80
"""Prompts are of different lengths, so that some steps begin pages, and others none."""
PREFILL_TOKENS = 128
FEW_TOKENS, ALL_TOKENS = 2048, 49152
STOP = ("\n\nUser:", "<|end|>")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


class Stopwatch:
    """CPU time of this thread in calls of some methods, by step."""

    def __init__(self) -> None:
        self.ns: dict[str, int] = {}

    def time(self, part: str, owner: Any, method: str) -> None:
        call = getattr(owner, method)

        @functools.wraps(call)
        def timed(*arguments, **settings):
            begin = time.thread_time_ns()
            result = call(*arguments, **settings)
            self.ns[part] = self.ns.get(part, 0) + time.thread_time_ns() - begin
            return result

        setattr(owner, method, timed)

    def take(self) -> dict[str, int]:
        """Nanoseconds since the last call, by part."""
        ns, self.ns = self.ns, {}
        return ns


def write_model(directory: Path, vocab_size: int = ALL_TOKENS) -> Tokenizer:
    """A config to make random weights of, and SmolLM2's tokenizer."""
    tokenizer = open_checkpoint().tokenizer()
    tokenizer.save(directory)
    config = CONFIG | {"vocab_size": vocab_size}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tokenizer


def watched(engine: Engine) -> Stopwatch:
    """Times the parts of an engine's steps."""
    watch = Stopwatch()
    watch.time("schedule", engine.scheduler, "schedule")
    watch.time("pack", engine._runner, "pack")
    watch.time("dispatch", engine._runner, "dispatch")
    watch.time("read", engine._runner, "read")
    watch.time("update", engine._core, "_update")
    watch.time("step", engine, "step")
    return watch


def step_times(
    engine: Engine, watch: Stopwatch, sequences: int, new_tokens: int
) -> tuple[list[dict[str, int]], list[list[int]]]:
    """Nanoseconds of each step with all sequences decoding, by part, and the outputs' tokens."""
    rng, steps = np.random.default_rng(0), []
    vocab_size = engine.plan.shapes.model.vocab_size
    params = SamplingParams(temperature=0, max_tokens=new_tokens, stop=STOP)
    requests = [
        engine.add(str(index), rng.integers(1000, vocab_size, int(length)).tolist(), params)
        for index, length in enumerate(rng.integers(*PROMPT_TOKENS, sequences))
    ]
    while engine.has_work:
        touched = engine.step()
        begin = time.thread_time_ns()
        for request in touched:
            request.take_deltas()
        delivered = time.thread_time_ns() - begin
        ns = watch.take() | {"deliver": delivered}
        if len(touched) == sequences and engine.scheduler.num_running == sequences:
            steps.append(ns)
    return steps, [list(request.sequence_outputs[0].seq.output_token_ids) for request in requests]


def text_ns(tokenizer: Tokenizer, outputs: list[list[int]]) -> float:
    """Nanoseconds of CPU time that text takes for a token."""
    for _ in range(2):  # The second time all tokens have been seen.
        detokenizers = [Detokenizer(tokenizer, stop=STOP) for _ in outputs]
        begin = time.thread_time_ns()
        for detokenizer, output in zip(detokenizers, outputs):
            for token_id in output:
                detokenizer.push((token_id,))
        took = time.thread_time_ns() - begin
    return took / sum(map(len, outputs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--new-tokens", type=int, default=160)
    arguments = parser.parse_args()
    columns = {}
    for vocab_size in (FEW_TOKENS, ALL_TOKENS):
        for count in arguments.sequences:
            name = f"{count} sequences, {vocab_size:,} tokens"
            columns[name] = times_us(count, vocab_size, arguments.new_tokens)
    parts = ("schedule", "pack", "update", "text", "deliver", "host", "dispatch", "read")
    print_table(
        "CPU time of the engine's thread, microseconds a token",
        ("part", *columns),
        [(part, *(column[part] for column in columns.values())) for part in parts],
    )


def times_us(count: int, vocab_size: int, new_tokens: int) -> dict[str, float]:
    """Microseconds a token, by part, of `count` sequences."""
    settings = {"max_num_seqs": count, "max_num_batched_tokens": count + PREFILL_TOKENS}
    with tempfile.TemporaryDirectory() as name:
        tokenizer = write_model(Path(name), vocab_size)
        with LLM(name, load_format="dummy", **settings) as llm:
            watch = watched(llm.engine)
            for _ in range(2):  # A served vocabulary has been seen, too.
                steps, outputs = step_times(llm.engine, watch, count, new_tokens)
    us = {
        part: statistics.median(step[part] for step in steps) / 1000 / count
        for part in ("schedule", "pack", "dispatch", "read", "update", "deliver", "step")
    }
    us["text"] = text_ns(tokenizer, outputs) / 1000
    us["update"] -= us["text"] + us["read"]
    us["host"] = us["step"] - us["dispatch"] - us["read"] + us["deliver"]
    return us


if __name__ == "__main__":
    main()
