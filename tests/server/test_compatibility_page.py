"""docs/compatibility.md names the tests that there are, and the fields that requests have."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from jaxserve.protocol.chat import ChatCompletionRequest
from jaxserve.protocol.completions import CompletionRequest
from jaxserve.protocol.errors import REMEDIES

CLIENTS = Path(__file__).parents[1] / "clients"
sys.path.insert(0, str(CLIENTS))
from compatibility import PAGE, ROOT, rows_of, said_by  # noqa: E402  (found by the path above)

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
