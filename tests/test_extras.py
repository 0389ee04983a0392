"""Without the packages of an extra: what needs them says so, and all else works."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTRAS = {"parquet": "pyarrow", "plots": "matplotlib", "loadgen": "aiohttp", "cluster": "ray"}
OF_CLUSTERS = "cluster"
"""An extra whose tests have an environment of their own."""
NEEDING = (
    "loadgen.client",
    "loadgen.draft_counts",
    "loadgen.endpoint",
    "loadgen.plot",
    "metrics.svg_page",
    "cli.search.page",
    "cluster.ray_replicas",
    "offline.reports.plots",
    "offline.reports.report",
)

BLOCKED = f"""
import sys
for module in {list(EXTRAS.values())}:
    sys.modules[module] = None
"""


def python(script: str, *args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-c", BLOCKED + script, *args]
    return subprocess.run(run, capture_output=True, text=True, cwd=cwd)


COMMANDS = {
    "parquet": ["batch", "in.parquet", "out.jsonl"],
    "plots": ["batch", "in.jsonl", "out.jsonl", "--report", "report.html"],
    "loadgen": ["bench", "serve", "--num-requests", "1"],
    "cluster": ["serve", "--data-parallel-size", "2"],
}


@pytest.fixture(scope="module")
def answers(llama, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """The exit status and stderr of each command, all run by one process."""
    directory = tmp_path_factory.mktemp("extras")
    for name in ("in.parquet", "in.jsonl"):
        (directory / name).write_text('{"prompt": "a"}\n', encoding="utf-8")
    script = """
import contextlib, io, json
from jaxserve.cli import main
answers = {}
for name, command in json.loads(sys.argv[1]).items():
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        answers[name] = [main(command), stderr.getvalue()]
print(json.dumps(answers))
"""
    model = ["--model", str(llama.path)]
    commands = {name: [*c, *model] if c[0] == "batch" else c for name, c in COMMANDS.items()}
    done = python(script, json.dumps(commands), cwd=directory)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in directory.iterdir()} == {"in.parquet", "in.jsonl"}
    return json.loads(done.stdout)


@pytest.mark.parametrize(("extra", "module"), EXTRAS.items())
def test_a_missing_package_is_told_with_the_command_that_installs_it(answers, extra, module):
    status, stderr = answers[extra]
    assert status == 1
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    assert stderr.endswith(
        f"this needs {module}, which is not installed; run: pip install 'jaxserve[{extra}]'\n"
    )


def test_all_else_is_imported_without_them():
    paths = sorted((ROOT / "jaxserve").rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    needing = {f"jaxserve.{name}" for name in NEEDING}
    assert needing < set(names)
    others = [name for name in names if name not in needing and not name.endswith("__main__")]
    done = python("".join(f"import {name}\n" for name in others))
    assert done.returncode == 0, done.stderr


def test_every_extra_that_the_code_names_is_one_and_tests_install_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    used = set()
    for path in (ROOT / "jaxserve").rglob("*.py"):
        used |= set(re.findall(r'with extra\("(\w+)"\)', path.read_text(encoding="utf-8")))
    assert used == set(EXTRAS) <= set(project["optional-dependencies"])
    (own,) = (r for r in project["optional-dependencies"]["test"] if r.startswith("jaxserve["))
    assert set(re.findall(r"\w+", own)) - {"jaxserve"} == used - {OF_CLUSTERS}
