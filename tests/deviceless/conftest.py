"""These tests compile for accelerators that need not be there, only their compilers do."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

sys.path[:0] = map(str, (Path(__file__).parent, Path(__file__).parents[1] / "helpers"))


def pytest_configure(config):
    config.addinivalue_line("markers", "deviceless: compiles for an accelerator; needs its plugin")


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """`compiled(function, arguments)`: compiled for an H200, with what was written on the way."""
    from gpu import Compiled

    return functools.partial(Compiled, dump=tmp_path, monkeypatch=monkeypatch)
