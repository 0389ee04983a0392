"""Launching commands and scripts as jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launched import Launched


@pytest.fixture
def launch_command(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Starts `jaxserve launch ARGUMENTS` in a directory of its own."""
    started = []

    def start(*arguments: str | Path) -> Launched:
        started.append(Launched(*arguments, cwd=tmp_path))
        return started[-1]

    yield start
    for launched in started:
        launched.kill()


@pytest.fixture
def launch(launch_command, tmp_path: Path) -> Callable[..., Launched]:
    """Starts `jaxserve launch OPTIONS -- script.py ARGUMENTS` in a directory of its own."""

    def start(script: str, *options: str | Path, arguments: tuple[str, ...] = ()) -> Launched:
        (tmp_path / "script.py").write_text(script)
        return launch_command(*options, "--", "script.py", *arguments)

    return start
