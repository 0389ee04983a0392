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
