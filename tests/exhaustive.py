"""Combinations of what CI tests apart: left out unless EXHAUSTIVE=1 is in the environment.

Of a matrix, CI takes cases that have each of its values once; a run of all of it, by
`EXHAUSTIVE=1 .ci/run`, takes hours and comes before a release.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

EXHAUSTIVE = bool(os.environ.get("EXHAUSTIVE"))

exhaustive = pytest.mark.skipif(not EXHAUSTIVE, reason="a combination: EXHAUSTIVE=1 runs it")


def combination(*values: Any) -> Any:
    """The values of a test's parameters, as a combination."""
    return pytest.param(*values, marks=exhaustive)


def combinations_of(values: Iterable[Any], *combined: Any) -> list[Any]:
    """Values of one parameter, of which `combined` are combinations."""
    return [combination(value) if value in combined else value for value in values]
