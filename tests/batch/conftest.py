"""Batch jobs on a tiny model, in this process and in their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from batch_files import prompts, write_lines
from patience import PATIENCE_S
from tiny_engines import TinyModel

from jaxserve.llm import LLM


@pytest.fixture(scope="session")
def batch_llm(llm_for) -> LLM:
    """An engine of the settings that the command is given too."""
    return llm_for()


class Batch:
    """`jaxserve batch` as people run it, with the session's cache."""

    def __init__(self, model: TinyModel, **changes: Any) -> None:
        settings = model.settings(model=model.path, **changes)
        self.settings = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str | Path, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "jaxserve", *prefix, "batch", *map(str, arguments)]
        process = subprocess.Popen(
            [*command, *self.settings],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
        )
        self._started.append(process)
        return process

    def __call__(self, *arguments: str | Path, prefix: tuple[str, ...] = ()) -> Ended:
        process = self.start(*arguments, prefix=prefix)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
        return Ended(process.returncode, stdout, stderr)

    def kill(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()


class Ended(NamedTuple):
    status: int
    stdout: str
    stderr: str


@pytest.fixture
def batch_of() -> Iterator[Callable[..., Batch]]:
    """Makes the command for a model, with other settings."""
    made: list[Batch] = []

    def make(model: TinyModel, **changes: Any) -> Batch:
        made.append(Batch(model, **changes))
        return made[-1]

    yield make
    for command in made:
        command.kill()


@pytest.fixture
def batch(llama, batch_llm, batch_of) -> Batch:
    """The command; its programs are in the cache."""
    return batch_of(llama)


@pytest.fixture
def job_paths(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """Writes an input of so many lines, and says where its output may be."""

    def make(count: int, max_tokens: int = 12) -> tuple[Path, Path]:
        path = write_lines(tmp_path / "in.jsonl", prompts(count, max_tokens))
        return path, tmp_path / "out.jsonl"

    return make
