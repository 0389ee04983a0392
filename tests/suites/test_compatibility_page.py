"""docs/compatibility.md names the tests that there are, and the fields that requests have."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from exhaustive import combination

from jaxserve.protocol.chat.request import ChatCompletionRequest
from jaxserve.protocol.completions import CompletionRequest
from jaxserve.protocol.errors import REMEDIES

CLIENTS = Path(__file__).parents[1] / "clients"
SUITES = CLIENTS.with_name("suites")
sys.path[:0] = [str(CLIENTS), str(SUITES)]
from compatibility import PAGE, ROOT, rows_of, said_by  # noqa: E402  (found by the path above)
from suite import Arguments, Suite, passed_of, run, tables_of  # noqa: E402

TEXT = PAGE.read_text(encoding="utf-8")


def fields_of(table: str) -> list[str]:
    """The code in the first cells of a table."""
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    return [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]


def test_every_client_that_is_tested_is_on_the_page_with_what_its_tests_say():
    files = [said_by(path) for path in sorted(CLIENTS.glob("test_*.py"))]
    assert {row.name: row.passed for row in rows_of(TEXT)} == {
        name: tuple(tests.values()) for name, tests in files
    }
    assert all(row.version[0].isdigit() for row in rows_of(TEXT))


def test_every_client_that_is_installed_is_tested():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = extras["project"]["optional-dependencies"]
    installed = {re.match(r"[\w-]+", requirement)[0] for requirement in extras["clients"]}
    tested = {said_by(path)[0] for path in CLIENTS.glob("test_*.py")}
    assert installed == tested - {"guidellm", "lm-eval"}, "these two are in [peers]"


@pytest.mark.parametrize("name", [path.stem for path in SUITES.glob("*.toml")])
def test_a_suite_is_on_the_page_with_its_counts_and_its_reasons(name):
    suite, passed = Suite.read(name), passed_of(TEXT, name)
    assert passed.keys() == suite.reasons.keys()
    assert tables_of(TEXT, name) == suite.table(passed)
    for path, reasons in suite.reasons.items():
        good, of = map(int, passed[path].split(" of "))
        assert of - good == len(reasons) or ("*" in reasons and of - good >= len(reasons)), path


@pytest.mark.parametrize(
    ("source", "reasons", "status"),
    [
        combination("def test(): pass", {}, 0),
        combination("def test(): raise KeyError", {"test": "why"}, 0),
        ("def test(): raise KeyError", {}, 1),
        ("def test(): pass", {"test": "why"}, 1),
        ("import no_such_module", {}, 1),
    ],
)
def test_what_fails_the_run_of_a_suite(tmp_path, monkeypatch, source, reasons, status):
    """Beside a file that passes. Names of files are unlike those of other cases: pytest keeps the
    modules in this process."""
    monkeypatch.chdir(tmp_path)
    one, other = f"{tmp_path.name}.py", f"{tmp_path.name}_other.py"
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / one).write_text(source)
    (tmp_path / "theirs" / other).write_text("def test(): pass")
    suite = Suite("theirs", "Theirs", "theirs", [], [], {one: reasons, other: {}}, {})
    arguments = Arguments(tmp_path, [one, other], [], write=False)
    assert run(suite, arguments, ["-q", "--import-mode=importlib"], []) == status


def test_every_test_of_ours_that_the_page_names_is_there():
    named = re.findall(r"`(tests/[\w/]+/test_\w+\.py)", TEXT)
    assert named and all((ROOT / path).is_file() for path in named)


def test_every_field_is_told_once():
    told = TEXT.split("## Fields of requests")[1]
    there, refused = map(fields_of, told.split("Refused, as"))
    known = CompletionRequest.model_fields | ChatCompletionRequest.model_fields
    assert sorted(there) == sorted(known)
    assert not set(refused) & set(known)


def test_what_to_do_instead_is_what_errors_say():
    rows = [row.split("|")[1:3] for row in TEXT.split("Refused, as")[1].splitlines() if "`" in row]
    told = {name: remedy.strip() for names, remedy in rows for name in fields_of(f"|{names}|")}
    assert told == REMEDIES
