"""The command on a tiny model. All runs share a cache, which `jaxserve compile` fills once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import on_demand
import pytest
from cli_command import CONTEXT, LLAMA_70B, SETTINGS, Command, Run

from jaxserve.cli import main

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from tiny_checkpoints import CONFIG, random_tensors, write_hf

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a chat template, whose context is long enough to be interrupted."""
    config = CONFIG | {"max_position_embeddings": CONTEXT}
    directory = write_hf(tmp_path_factory.mktemp("models") / "tiny", config, random_tensors(config))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return directory


@pytest.fixture(scope="session")
def config_70b(tmp_path_factory) -> Path:
    """A config.json alone."""
    path = tmp_path_factory.mktemp("70b") / "config.json"
    path.write_text(json.dumps(LLAMA_70B))
    return path


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cache")
    directory.chmod(0o700)
    return directory


@pytest.fixture(scope="session")
def first_compile(cache: Path, tiny_model: Path) -> Run:
    """The run of `jaxserve compile` that found an empty cache."""
    with on_demand.suspended():
        return Command(cache)("compile", tiny_model, *SETTINGS)


@pytest.fixture(scope="session")
def command(cache: Path, first_compile: Run) -> Command:
    """The command, with the programs of SETTINGS in its cache."""
    assert first_compile.status == 0, first_compile.stderr
    return Command(cache)


@pytest.fixture
def run_here(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Run]:
    """The command without the seconds a new process takes to import JAX."""
    monkeypatch.setenv("JAXSERVE_CACHE", str(command.cache))

    def run(*args: str | Path) -> Run:
        status = main([str(arg) for arg in args])
        return Run(status, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "trace.json"


@pytest.fixture(scope="session")
def answer(command: Command, tiny_model: Path, trace_file: Path) -> Run:
    """The first 12 tokens of the answer to "hi", and the timeline in `trace_file`."""
    settings = ("--model", tiny_model, *SETTINGS, "--max-tokens=12")
    run = command("generate", "hi", *settings, "--trace-file", trace_file)
    assert run.status == 0, run.stderr
    return run
