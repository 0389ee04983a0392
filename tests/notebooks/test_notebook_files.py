"""Notebooks as files: what must be so for everybody who opens one, without running any."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))
COLAB = "https://colab.research.google.com/github/jaxserve/jaxserve/blob/main/colab/"
every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def cells(path, kind):
    """Sources of the cells of a kind."""
    return ["".join(cell["source"]) for cell in read(path)["cells"] if cell["cell_type"] == kind]


@every_notebook
def test_a_change_of_a_notebook_is_a_small_diff(path):
    """No outputs, which belong to one run; cells keep their names, and fields their order."""
    notebook = read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(rf"{path.stem}-\w+", name) for name in ids)
    for cell in notebook["cells"]:
        assert not cell.get("outputs"), "clear it: jupyter nbconvert --clear-output --inplace"
        assert cell.get("execution_count") is None
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    assert path.read_text(encoding="utf-8") == text


@every_notebook
def test_it_begins_with_a_title_and_a_link_that_opens_it(path):
    first = cells(path, "markdown")[0]
    assert first.startswith("# ")
    assert f"]({COLAB}{path.name})" in first


@every_notebook
def test_it_installs_jaxserve_only_where_there_is_none(path):
    install, *others = cells(path, "code")
    lines = install.splitlines()
    guard = lines.index('if importlib.util.find_spec("jaxserve") is None:')
    (pip,) = (number for number, line in enumerate(lines) if "%pip install" in line)
    assert guard < pip and lines[pip].startswith("    ")
    assert install == cells(NOTEBOOKS[0], "code")[0], "the same in every notebook"
    assert not any("pip install" in source for source in others)


@every_notebook
def test_its_code_is_python_and_knows_no_machine(path):
    for source in cells(path, "code"):
        compile(re.sub(r"^(\s*)%.*$", r"\1pass", source, flags=re.MULTILINE), path.name, "exec")
        assert not re.search(r"""["'](/(?!dev\b|v1\b)\w+|[A-Z]:\\|~/)""", source), source
        assert "JAX_PLATFORMS" not in source


def test_there_are_notebooks_and_the_documents_name_each():
    documents = (ROOT / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert NOTEBOOKS
    assert [path.name for path in NOTEBOOKS if f"../colab/{path.name}" not in documents] == []
