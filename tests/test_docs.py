"""The documents say what the code says: quoted lines, links, and the README's example."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "adding-a-model.md"
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("docs/**/*.md")),
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read(path):
    return path.read_text(encoding="utf-8")


def unindented(text):
    """The lines of `text` without indentation, each between line breaks."""
    return "\n" + "".join(line.strip() + "\n" for line in text.splitlines())


def test_the_guide_quotes_the_code():
    """Each block is found, whole, in the file that the last link before it points to."""
    guide = read(GUIDE)
    blocks = list(PYTHON.finditer(guide))
    assert blocks
    for block in blocks:
        source = LINK.findall(guide, 0, block.start())[-1]
        assert unindented(block[1]) in unindented(read(GUIDE.parent / source)), source


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document):
    targets = [link.split("#")[0] for link in LINK.findall(read(document)) if "://" not in link]
    assert [link for link in targets if not (document.parent / link).exists()] == []


def test_the_readme_example_is_python():
    examples = PYTHON.findall(read(ROOT / "README.md"))
    assert examples
    for example in examples:
        compile(example, "README.md", "exec")


ARCHITECTURE = ROOT / "docs" / "architecture.md"
PATH = re.compile(r"`([\w/]+(?:\.py|/))`")


def is_there(path):
    return any((start / path).exists() for start in (ROOT, ROOT / "jaxserve"))


def test_the_files_of_the_architecture_are_there():
    """Paths of the page are below jaxserve/, or its own; within a section also below its folder."""
    named = PATH.findall(read(ARCHITECTURE))
    beside = ("device_state.py", "page_programs.py", "sampling_programs.py")
    beside += (
        "prompt_programs.py",
        "speculation_programs.py",
        "shapes/program.py",
        "shapes/params.py",
        "shapes/kv.py",
    )
    beside += ("forward/forward_programs.py", "forward/step.py", "layout/step_layout.py")
    beside += ("layout/frozen_plan.py", "layout/step_inputs.py", "forward/pipeline_step.py")
    beside += ("compilation/executables.py", "compilation/executable_cache.py", "api.py")
    assert len(named) > 60
    missing = {path for path in named if not is_there(path)}
    assert {path for path in missing if path not in beside} == set()
    for name in beside[:-1]:
        assert (ROOT / "jaxserve" / "runtime" / "programs" / name).exists()


def test_the_files_of_the_papers_are_there():
    named = PATH.findall(read(ROOT / "docs" / "papers.md"))
    assert len(named) > 30
    assert {path for path in named if not is_there(path)} == set()


def test_each_change_takes_three_files_at_most():
    table = read(ARCHITECTURE).split("## Where to change what")[1].split("\n## ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 15
    for _, change, files, _ in rows:
        assert 1 <= len(set(PATH.findall(files))) <= 3, change
