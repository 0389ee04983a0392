"""Runs a Dockerfile's steps in fresh virtual environments, where there is no docker.

    python docker/build_without_docker.py docker/cpu.Dockerfile generate "Why is the sky blue?"

Each stage is a directory with a virtual environment of this Python, in the place of the base image.
COPY and RUN do what they say, with absolute paths moved into the stage's directory. At the end the
ENTRYPOINT runs with the arguments, or with CMD. Users and the system's packages are left out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

CONTEXT = Path(__file__).resolve().parents[1]
NOT_HERE = {"USER", "VOLUME", "EXPOSE"}


class Stage:
    """A directory in the place of an image."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.directory = root
        self.variables: dict[str, str] = {}
        self.entrypoint: list[str] = []
        self.command: list[str] = []
        venv.create(root / "venv", with_pip=True)

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/") if name.startswith("/") else self.directory / name

    def run(self, command: str) -> None:
        """In a shell; the absolute paths that exist in the stage, or are made, are moved."""
        print(f"RUN {command}", flush=True)
        moved = re.sub(r"(?<![\w.*])/(?=\w)", f"{self.root}/", command)
        subprocess.run(
            ["sh", "-euc", moved], check=True, cwd=self.directory, env=self.environment()
        )

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(self.root / "venv" / "bin"), os.environ["PATH"]])
        outside = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        return self.variables | outside | {"PATH": path}


def instructions(dockerfile: Path) -> Iterator[tuple[str, str]]:
    """(FROM, COPY, ..., and what follows)."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE)
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word.upper(), rest.strip()


def build(dockerfile: Path, scratch: Path) -> Stage:
    """The last stage. Raises CalledProcessError for a step that fails."""
    stages: dict[str, Stage] = {}
    for word, rest in instructions(dockerfile):
        if word == "FROM":
            name = rest.partition(" AS ")[2] or str(len(stages))
            stage = stages[name] = Stage(scratch / name)
        elif word == "WORKDIR":
            stage.directory = stage.path(rest)
            stage.directory.mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            copy(rest.split(), stage, stages)
        elif word == "RUN" and "useradd" not in rest:
            stage.run(rest)
        elif word == "ENV":
            pairs = dict(pair.split("=", 1) for pair in rest.split())
            stage.variables |= {name: stage_path(stage, text) for name, text in pairs.items()}
        elif word in ("ENTRYPOINT", "CMD"):
            setattr(stage, "entrypoint" if word == "ENTRYPOINT" else "command", json.loads(rest))
        elif word not in NOT_HERE | {"RUN"}:
            raise ValueError(f"{dockerfile} has {word}, which this script does not know")
    return stage


def stage_path(stage: Stage, text: str) -> str:
    return str(stage.path(text)) if text.startswith("/") else text


def copy(words: list[str], stage: Stage, stages: dict[str, Stage]) -> None:
    source = CONTEXT
    if words[0].startswith("--from="):
        source = stages[words.pop(0).removeprefix("--from=")].root
    *names, target = words
    for name in names:
        found, into = source / name.lstrip("/"), stage.path(target)
        if found.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(found, into, ignore=ignored, dirs_exist_ok=True)
        else:
            into.mkdir(parents=True, exist_ok=True)
            shutil.copy(found, into)


def main() -> int:
    dockerfile, *args = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        stage = build(Path(dockerfile), Path(scratch))
        program, *words = [*stage.entrypoint, *(args or stage.command)]
        print("$", program, *words, flush=True)
        done = subprocess.run(
            [stage.root / "venv" / "bin" / program, *words], cwd=scratch, env=stage.environment()
        )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
