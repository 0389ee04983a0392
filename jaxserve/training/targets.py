"""What a drafter learns from: the tokens that the model itself answers with."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.core.errors import ConfigError
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.llm import LLM
from jaxserve.models.loading.params import Progress

PromptOrChat = str | list[dict[str, Any]]
NUM_STREAMS = 32
"""Prompts that are answered at once, if there are as many."""
_CHUNK = 4 * NUM_STREAMS
"""Answers that are written together."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A prompt and the model's answer, in tokens."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


def read_prompts(path: Path) -> list[PromptOrChat]:
    """The prompts in a JSONL file: each line is `{"prompt": text}` or `{"messages": [...]}`, as
    in a request of OpenAI's.

    Raises ConfigError, with the line's number, for any other line, and for a file without prompts.
    """
    prompts: list[PromptOrChat] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"data is {str(path)!r}, which cannot be read ({why}); give a JSONL file of prompts."
        ) from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        record = record if isinstance(record, dict) else {}
        prompt = record.get("prompt", record.get("messages"))
        if not isinstance(prompt, str | list) or not prompt:
            raise ConfigError(
                f'line {number} of {path} has no prompt; give {{"prompt": "text"}} or '
                '{"messages": [...]} on each line.'
            )
        prompts.append(prompt)
    if len(prompts) < 2:
        raise ConfigError(
            f"{path} has {len(prompts)} prompts; give at least 2, one to learn from and one to "
            "measure with."
        )
    return prompts


def make_targets(
    model: str | Path | None,
    prompts: list[PromptOrChat],
    path: Path,
    max_tokens: int,
    temperature: float | None,
    progress: Progress,
) -> list[Target]:
    """Answers every prompt with up to `max_tokens` tokens, sampled as the model's files say, but
    for a `temperature` that is given. Those in `path`, which is written as they end, are not
    answered again.

    Raises RequestError for a prompt that is too long.
    """
    done = list(_read(path)) if path.exists() else []
    if len(done) < len(prompts):
        _write(path, done)  # Without a line that was cut off.
        streams = min(NUM_STREAMS, len(prompts))
        with LLM(model, max_num_seqs=streams) as llm, path.open("a", encoding="utf-8") as file:
            while len(done) < len(prompts):
                params = llm.default_sampling_params(max_tokens=max_tokens, seed=0)
                if temperature is not None:
                    params = dataclasses.replace(params, temperature=temperature)
                chunk = list(_answered(llm, prompts[len(done) : len(done) + _CHUNK], params))
                done += chunk
                file.writelines(map(_line, chunk))
                file.flush()
                progress(len(done), len(prompts))
    return done


def _answered(llm: LLM, prompts: list[Any], params: SamplingParams) -> Iterator[Target]:
    texts = [prompt if isinstance(prompt, str) else llm.chat_prompt(prompt) for prompt in prompts]
    for output in llm.generate(texts, params, use_tqdm=False):
        yield Target(tuple(output.prompt_token_ids), tuple(output.outputs[0].token_ids))


def _line(target: Target) -> str:
    return json.dumps(dataclasses.asdict(target)) + "\n"


def _write(path: Path, targets: list[Target]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(map(_line, targets)), encoding="utf-8")


def _read(path: Path) -> Iterator[Target]:
    """Up to a line that was cut off."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            return
        yield Target(tuple(record["prompt"]), tuple(record["output"]))


@dataclasses.dataclass(frozen=True)
class TargetWindow:
    """Consecutive tokens int32 [length] of a target, and which of them, bool [length], the model
    generated; `index` is its place among all."""

    index: int
    token_ids: np.ndarray
    generated: np.ndarray


def windows(targets: list[Target], length: int) -> list[TargetWindow]:
    """All tokens of the targets in windows of `length`, the last one of each filled up."""
    found: list[TargetWindow] = []
    for target in targets:
        tokens = np.array([*target.prompt, *target.output], np.int32)
        generated = np.arange(len(tokens)) >= len(target.prompt)
        for first in range(0, len(tokens), length):
            part = slice(first, first + length)
            padding = (0, length - len(tokens[part]))
            if generated[part].any():
                padded = (np.pad(each[part], padding) for each in (tokens, generated))
                found.append(TargetWindow(len(found), *padded))
    return found
