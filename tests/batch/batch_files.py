"""Inputs of batch jobs, and what is in their outputs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxserve.offline.journal import Result

SETTINGS = {"model": "f" * 64, "model_names": ["tiny"], "seed": 0, "dtype": "float32"}


def prompts(count: int, max_tokens: int = 12) -> list[dict[str, Any]]:
    """Lines with prompts that share beginnings, half of them sampled, with ids but for each
    tenth."""
    draw = random.Random(count)
    lines = []
    for number in range(count):
        line: dict[str, Any] = {
            "prompt": f"{'abcde'[number % 5] * 12} {draw.randrange(10**9)}",
            "max_tokens": draw.randint(1, max_tokens),
            "temperature": float(number % 2),
            "ignore_eos": True,
        }
        lines.append(line if number % 10 == 9 else {"custom_id": f"q{number}", **line})
    return lines


def write_lines(path: Path, lines: Iterable[Any]) -> Path:
    """JSONL; a line that is text or bytes is written as it is."""
    with path.open("wb") as file:
        for line in lines:
            if not isinstance(line, str | bytes):
                line = json.dumps(line)
            file.write((line.encode() if isinstance(line, str) else line) + b"\n")
    return path


def answers(output: Path) -> dict[int, dict[str, Any]]:
    """What each line of the input was answered, but for the job's time. Every line is whole, and
    there once."""
    found = {}
    for text in output.read_bytes().splitlines(keepends=True):
        result = Result.parse(text)
        assert result is not None, text
        assert result.number not in found, text
        result.content["response"]["body"].pop("created", None)
        found[result.number] = result.content
    return found


def errors(output: Path) -> dict[int, str]:
    """The codes of the lines that failed."""
    return {
        number: content["error"]["code"]
        for number, content in answers(output).items()
        if content["error"] is not None
    }


def answer(number: int, text: str = "") -> Result:
    """A result as a run would write it, for tests without an engine."""
    usage = {"prompt_tokens": number, "completion_tokens": len(text)}
    response = {"status_code": 200, "body": {"choices": [{"text": text}], "usage": usage}}
    return Result.of(number, custom_id=f"line-{number}", response=response, error=None)
