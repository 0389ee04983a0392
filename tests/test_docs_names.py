"""Names that the documents and docstrings promise are there: tests, settings, fields, options,
metrics, members of classes."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxserve
from jaxserve.cli.arguments.chosen import settings_of
from jaxserve.cli.arguments.errors import in_flags
from jaxserve.cli.serve import Serve
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.settings.config import EngineConfig
from jaxserve.core.settings.vllm_settings import ANSWERS, SERVER_ANSWERS
from jaxserve.kv.manager import KVManager
from jaxserve.kv.pages import PagePool
from jaxserve.metrics.kv_metrics import kv_metrics
from jaxserve.metrics.metrics import Metrics
from jaxserve.protocol.chat.request import ChatCompletionRequest
from jaxserve.protocol.completions import CompletionRequest

DOCS = Path(__file__).parents[1] / "docs"
MIGRATION = (DOCS / "migration-from-vllm.md").read_text(encoding="utf-8")
PACKAGES = ("jaxserve", "pallas_kernels", "sharding_rules")
CODE = re.compile(r"`([^`]+)`")


def section(title):
    """The text under a heading of the migration guide."""
    return re.search(rf"^## {title}.*?\n(.*?)(?=^## |\Z)", MIGRATION, re.M | re.S)[1]


def ours(title):
    """The names in the second column of a section's tables."""
    rows = [line.split("|") for line in section(title).splitlines() if line.startswith("|")]
    return [name for row in rows[2:] for name in CODE.findall(row[2])]


def fields(cls):
    return {field.name for field in dataclasses.fields(cls)}


@pytest.mark.parametrize(
    "document",
    [DOCS.parent / "README.md", *sorted(DOCS.glob("**/*.md"))],
    ids=lambda path: path.name,
)
def test_tests_that_are_named_exist(document):
    for path, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", document.read_text("utf-8")):
        source = (DOCS.parent / path).read_text(encoding="utf-8")
        assert f"def {name}(" in source, f"{path}::{name}"


def members(node):
    """Names that a class defines or annotates, and what its methods read or assign of self."""
    names = set()
    for part in ast.walk(node):
        match part:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                names.add(name)
    return names


def test_members_of_classes_that_docstrings_name_exist():
    sources = {
        path: path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in sorted((DOCS.parent / package).rglob("*.py"))
    }
    known, bases = {}, {}
    for source in sources.values():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                known.setdefault(node.name, set()).update(members(node))
                bases.setdefault(node.name, set()).update(map(ast.unparse, node.bases))

    def has(name, member):
        return member in known[name] or any(has(b, member) for b in bases[name] if b in known)

    named = re.compile(r"`([A-Z]\w+)\.(\w+)")
    absent = {
        f"{path.name}: {name}.{member}"
        for path, source in sources.items()
        for name, member in named.findall(source)
        if name not in known or not has(name, member)
    }
    assert not absent


def test_settings():
    names = ours("Settings")
    assert "page_size" in names
    assert set(names) <= fields(EngineConfig)


def test_settings_of_vllm_are_answered_as_the_guide_says():
    """Each name of vLLM's that is not ours, with the setting of ours in its row."""
    told = section("Settings")
    rows = [line.split("|") for line in told.splitlines() if line.startswith("|")]
    answers = {name: CODE.findall(row[2]) for row in rows[2:] for name in CODE.findall(row[1])}
    absent = CODE.findall(told.split("Absent, and why:")[1])
    answers |= {name: [] for name in absent if name in ANSWERS}
    answers = {name: names for name, names in answers.items() if name.islower()}
    assert {*ANSWERS} == {*answers} - fields(EngineConfig)
    for name, answer in ANSWERS.items():
        assert all(one in answer for one in answers[name][:1]), name
        assert set(re.findall(r"\w+_\w+", answer)) <= fields(EngineConfig)


def test_flags_of_vllm_are_answered_as_the_guide_says():
    """Each flag of vLLM's server that is not ours, with the flag of ours in its row."""
    rows = [line.split("|") for line in section("Flags of the server").splitlines()[3:]]
    rows = [row for row in rows if len(row) > 3]
    answers = {name: CODE.findall(row[2]) for row in rows for name in CODE.findall(row[1])}
    settings = {flag: flag.removeprefix("--").replace("-", "_") for flag in answers}
    known = {setting.name for setting in settings_of(Serve)}
    absent = {name for flag, name in settings.items() if flag.startswith("--")} - known
    assert absent == {*SERVER_ANSWERS}
    for flag, name in settings.items():
        if name in absent:
            shown = in_flags(SERVER_ANSWERS[name], Serve)
            assert all(one in shown for one in answers[flag][:1]), flag


def test_calls():
    names = ours("Calls")
    assert "LLM.stream" in names
    for name in names:
        target = jaxserve
        for part in name.split("."):
            target = getattr(target, part)


def test_sampling_parameters_are_all_there_and_all_told():
    told = section("Sampling parameters").split("|")[0]
    assert set(CODE.findall(told)) == fields(SamplingParams) - {"priority"}


def test_fields_of_requests():
    told = section("Routes").split("A body may have")[1].split("vLLM ignores")[0]
    of_both, of_chats = (set(CODE.findall(part)) for part in told.split("in\nchats"))
    both = CompletionRequest.model_fields.keys() & ChatCompletionRequest.model_fields.keys()
    assert of_both <= both
    assert of_chats <= ChatCompletionRequest.model_fields.keys()


def test_metrics():
    known = Metrics().get_metrics() | kv_metrics(KVManager(PagePool(2, 1)), 1)
    vllm = {name for name in known if name.startswith("vllm:")}
    vllm.add("vllm:admission_rejections_total")  # The server's own.
    told = section("Metrics")
    table, rest = told.rsplit("|\n", 1)
    assert set(CODE.findall(table)) - {"model_name"} == vllm
    assert {n for n in CODE.findall(rest) if n.startswith("jaxserve:")} - {"jaxserve:"} <= {*known}


@pytest.mark.parametrize(
    ("document", "commands"),
    [
        ("migration-from-vllm.md", ["serve"]),
        ("bench-serve.md", ["bench serve"]),
        ("simulator.md", ["plan", "simulate", "profile", "search"]),
    ],
)
def test_options(document, commands):
    scripts = [[sys.executable, "-m", "jaxserve", *c.split(), "--help"] for c in commands]
    known = "".join(
        subprocess.run(script, capture_output=True, text=True, check=True).stdout
        for script in scripts
    )
    if commands == ["serve"]:
        names = ours("Flags of the server")
    else:
        text = (DOCS / document).read_text(encoding="utf-8")
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
        names = [name for code in CODE.findall(prose) for name in re.findall(r"--[\w-]+", code)]
    assert names
    assert set(names) <= set(re.findall(r"--[\w-]+", known))
