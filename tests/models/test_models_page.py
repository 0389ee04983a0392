"""docs/models.md has the architectures that there are, with what their tests compare."""

from __future__ import annotations

from models_page import MODELS, PAGE, with_tables

from jaxserve.models.registry import ARCHITECTURES


def test_the_tables_are_current():
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, "run `python tests/models/models_page.py`"


def test_every_architecture_names_its_models():
    assert MODELS.keys() == ARCHITECTURES.keys()
