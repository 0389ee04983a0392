"""Combinations of values that CI tests separately: skipped unless EXHAUSTIVE=1 is set.

Of a matrix, CI takes cases with most of its values once. A run of all of them, by
`EXHAUSTIVE=1 .ci/run`, takes hours and comes before a release.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

EXHAUSTIVE = os.environ.get("EXHAUSTIVE", "0") != "0"

exhaustive = pytest.mark.skipif(not EXHAUSTIVE, reason="a combination: EXHAUSTIVE=1 runs it")


def combination(*values: Any) -> Any:
    """The values of a test's parameters, as a combination."""
    return pytest.param(*values, marks=exhaustive)


def combinations_of(values: Iterable[Any], *combined: Any) -> list[Any]:
    """Values of one parameter, of which `combined` are combinations."""
    return [combination(value) if value in combined else value for value in values]


def combinations_but(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Values of one parameter, of which all but `kept` are combinations."""
    return [value if value in kept else combination(value) for value in values]
