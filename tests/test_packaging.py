"""What is packaged, what `jaxserve` shows of itself, and the files about the project."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import yaml

import jaxserve

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_dir_shows_what_is_public_and_imports_nothing():
    script = "import jaxserve, sys; print(*dir(jaxserve)); print('jax' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    names, has_jax = done.stdout.splitlines()
    assert names.split() == sorted(jaxserve.__all__)
    assert has_jax == "False"
    assert all(hasattr(jaxserve, name) for name in jaxserve.__all__)


def test_type_checkers_see_every_public_name():
    """Those imported under TYPE_CHECKING: `__getattr__` alone would make them `Any`."""
    tree = ast.parse(inspect.getsource(jaxserve))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(jaxserve.__all__) <= imported


def test_every_package_is_marked_as_typed():
    data = PROJECT["tool"]["setuptools"]["package-data"]
    for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]:
        package = pattern.removesuffix("*")
        assert (ROOT / package / "py.typed").exists()
        assert "py.typed" in data[package]


def test_the_citation_and_the_changelog_are_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == jaxserve.__version__ == PROJECT["project"]["version"]
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["repository-code"] == PROJECT["project"]["urls"]["Source"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {jaxserve.__version__}\n" in changes
