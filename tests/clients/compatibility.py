"""Write docs/compatibility.md's rows of the clients that ran."""

from __future__ import annotations

import ast
import importlib.metadata
import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
_TABLE = re.compile(r"(<!-- clients -->\n)(.*?)(<!-- end of clients -->)", re.DOTALL)
_HEAD = "| client | version | what passed |\n|---|---|---|\n"


class Row(NamedTuple):
    """A client: its name, the version that ran, what its tests say."""

    name: str
    version: str
    passed: tuple[str, ...]


def said_by(path: Path) -> tuple[str, dict[str, str]]:
    """The client that a file tests (its CLIENT), and what its tests say, by their names."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = [
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and any(isinstance(target, ast.Name) and target.id == "CLIENT" for target in node.targets)
    ]
    tests = {
        node.name: _said(node)
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }
    return str(names[0]), tests


def _said(test: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The first paragraph of a test's docstring, as a phrase."""
    paragraph = (ast.get_docstring(test) or "").split("\n\n")[0]
    return " ".join(paragraph.split()).rstrip(".")


def rows_of(page: str) -> list[Row]:
    """The rows of the page's table."""
    rows = []
    for line in _TABLE.search(page)[2].splitlines()[2:]:
        name, version, passed = (cell.strip() for cell in line.strip("|").split("|"))
        rows.append(Row(name, version, tuple(passed.split("; "))))
    return rows


class Writer:
    """Pytest's plugin of `--write-compatibility`. A client is written if all of its tests ran and
    passed; the rows of others stay."""

    def __init__(self) -> None:
        self._outcomes: dict[Path, dict[str, bool]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path, name = ROOT / report.location[0], report.location[2].split("[")[0]
        tests = self._outcomes.setdefault(path, {})
        good = report.passed if report.when == "call" else not (report.failed or report.skipped)
        tests[name] = tests.get(name, True) and good

    def pytest_sessionfinish(self) -> None:
        page = PAGE.read_text(encoding="utf-8")
        rows = {row.name: row for row in rows_of(page)}
        for path, outcomes in self._outcomes.items():
            name, tests = said_by(path)
            if all(outcomes.get(test) for test in tests):
                version = importlib.metadata.version(name)
                rows[name] = Row(name, version, tuple(tests.values()))
        lines = (
            f"| {row.name} | {row.version} | {'; '.join(row.passed)} |\n"
            for row in sorted(rows.values())
        )
        table = _HEAD + "".join(lines)
        PAGE.write_text(_TABLE.sub(lambda m: m[1] + table + m[3], page), encoding="utf-8")
