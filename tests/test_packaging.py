"""What is packaged, what `jaxserve` shows of itself, and the files about the project."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
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


def test_every_dependency_is_imported():
    """By the packages or a notebook, or run, as pip is to fetch the default model.

    Names of modules that are not those of their packages are given here."""
    modules = {"orbax-checkpoint": "orbax", "pyyaml": "yaml"}
    names = {re.match(r"[\w-]+", line)[0] for line in PROJECT["project"]["dependencies"]}
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for package in ("jaxserve", "pallas_kernels", "sharding_rules")
        for path in (ROOT / package).rglob("*.py")
    )
    for notebook in (ROOT / "colab").glob("*.ipynb"):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        sources += "".join("\n" + "".join(cell["source"]) for cell in cells)
    for name in names - {"pip"}:
        pattern = rf"^\s*(from|import) {modules.get(name, name)}\b"
        assert re.search(pattern, sources, re.M), f"nothing imports {name}"


def test_the_citation_and_the_changelog_are_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["version"] == jaxserve.__version__ == PROJECT["project"]["version"]
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["repository-code"] == PROJECT["project"]["urls"]["Source"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {jaxserve.__version__}\n" in changes


SAMPLE = """
from jaxserve import LLM, AsyncEngine, SamplingParams

llm = LLM("model", max_num_seqs=3, scheduler="sarathi")
reveal_type(llm.generate("hi", SamplingParams(temperature=0.0))[0].outputs[0].text)
LLM(max_nm_seqs=3)
LLM(max_num_seqs="3")
LLM(scheduler="fifo")
AsyncEngine.load(max_nm_seqs=3)
SamplingParams(temprature=0.0)
"""


@pytest.mark.interfaces
def test_a_type_checker_finds_wrong_settings_and_only_those(tmp_path):
    """Third-party packages are left out: JAX alone takes mypy a minute."""
    (tmp_path / "sample.py").write_text(SAMPLE)
    options = ["--no-site-packages", "--ignore-missing-imports", "--follow-imports=silent"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--no-error-summary", "sample.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(ROOT)},
    )
    told = [line.removeprefix("sample.py:").split(":", 1) for line in done.stdout.splitlines()]
    assert 'note: Revealed type is "str"' in done.stdout or '"builtins.str"' in done.stdout
    wrong = {number for number, message in told if " error: " in message}
    assert wrong == {"6", "7", "8", "9", "10"}, done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of what is packaged, because builds write beside their sources."""
    copy = tmp_path_factory.mktemp("project")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("jaxserve", "pallas_kernels", "sharding_rules"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.mark.interfaces
def test_the_wheel_that_the_sdist_makes_has_every_file(project, tmp_path):
    command = [sys.executable, "-m", "build", "--outdir", str(tmp_path), str(project)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    assert f"-{jaxserve.__version__}" in wheel.name and jaxserve.__version__ in sdist.name
    packaged = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    packages = ("jaxserve", "pallas_kernels", "sharding_rules")
    files = {
        path.relative_to(ROOT).as_posix()
        for package in packages
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packaged == files


@pytest.mark.interfaces
def test_an_editable_install_is_a_path_that_type_checkers_follow(project, tmp_path):
    script = (
        "import sys\n"
        "from build import ProjectBuilder\n"
        "from build.env import DefaultIsolatedEnv\n"
        "with DefaultIsolatedEnv() as env:\n"
        "    builder = ProjectBuilder.from_isolated_env(env, sys.argv[1])\n"
        "    env.install(builder.build_system_requires)\n"
        "    builder.build('editable', sys.argv[2])\n"
    )
    command = [sys.executable, "-c", script, str(project), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as wheel:
        (pth,) = [name for name in wheel.namelist() if name.endswith(".pth")]
        assert Path(wheel.read(pth).decode().strip()) == project


@pytest.mark.interfaces
def test_dockerfiles_have_no_findings():
    dockerfiles = sorted((ROOT / "docker").glob("*.Dockerfile"))
    assert [path.stem for path in dockerfiles] == ["cpu", "cuda"]
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, *dockerfiles], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
