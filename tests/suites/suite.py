"""Runs the test files of another server, unmodified, and writes what passed to the page of clients.

A suite is a TOML file: the files that are run, with the tests that do not pass by the reason, and
those that are not run, each with its reason. A test that fails without a reason fails the run, and
so do one that passes in spite of a reason and a file that cannot be collected.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers"), str(ROOT / "tests" / "models")]
from server_process import CONTEXT, TEMPLATE, ServerProcess  # noqa: E402  (found by the path)
from tiny_checkpoints import CONFIG, random_tensors, write_hf  # noqa: E402

from jaxserve.models.loading.fetch import default_model_path  # noqa: E402

REAL = (
    *("--max-model-len=8192", "--max-num-seqs=8", "--max-num-batched-tokens=136"),
    f"--kv-cache-memory-bytes={512 << 20}",
)
"""Settings of a server of SmolLM2."""

MAX_NAMES = 4
"""Names of tests that the page has for one reason."""
REST = "*"

PAGE = ROOT / "docs" / "compatibility.md"
_HEAD = "| file | passed | the others |\n|---|---:|---|\n"
_NOT_RUN_HEAD = "| not run | why |\n|---|---|\n"


@dataclasses.dataclass(frozen=True)
class Suite:
    """The tests of another server, as `<name>.toml` beside this file lists them.

    Attributes:
        root: the directory of the checkout that paths are below.
        real: the files that SmolLM2 is served for, since they read texts or count tokens; for
            the others it is a tiny random model, hundreds of times faster.
        counting: the files that expect a server which has answered no other test.
        reasons: by file and test, why it does not pass; `REST` stands for the other tests.
        not_run: by reason, the files that are not run.
    """

    name: str
    title: str
    root: str
    real: list[str]
    counting: list[str]
    reasons: dict[str, dict[str, str]]
    not_run: dict[str, list[str]]

    @classmethod
    def read(cls, name: str) -> Suite:
        raw = tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))
        reasons = {
            path: {test: why for why, tests in by_reason.items() for test in tests}
            for path, by_reason in raw["run"].items()
        }
        given = (raw[key] for key in ("title", "root", "real", "counting"))
        return cls(name, *given, reasons, raw["not_run"])

    def model(self) -> tuple[Path, tuple[str, ...]]:
        """The model for the test that runs, and settings of its server."""
        return (default_model_path(), REAL) if self._file() in self.real else (tiny_model(), ())

    def counts_requests(self) -> bool:
        """Whether the test that runs needs a server of its own."""
        return self._file() in self.counting

    def _file(self) -> str:
        """The file of the test that runs."""
        return os.environ["PYTEST_CURRENT_TEST"].split("::")[0].removeprefix(f"{self.root}/")

    def serve(self, flags: Iterable[str], names: Iterable[str]) -> ServerProcess:
        """A ready server for the test that runs, with these flags and names of its model."""
        path, settings = self.model()
        log = Path(tempfile.mkstemp(suffix=".log")[1])
        names = ["--served-model-name", *dict.fromkeys(names)]
        server = ServerProcess(path, log, *settings, *flags, *names)
        try:
            return server.wait_ready()
        except BaseException:
            server.stop()
            raise

    def table(self, passed: dict[str, str]) -> str:
        """The page's two tables; `passed` has the cells of the files that are run."""
        lines = [
            f"| `{path}` | {passed[path]} | {_by_reason(reasons)} |\n"
            for path, reasons in sorted(self.reasons.items())
        ]
        rest = [
            f"| {', '.join(f'`{path}`' for path in paths)} | {why} |\n"
            for why, paths in self.not_run.items()
        ]
        return _HEAD + "".join(lines) + "\n" + _NOT_RUN_HEAD + "".join(rest)


@functools.cache
def tiny_model() -> Path:
    """A random model with a vocabulary of bytes, whose answers end after some tens of them."""
    directory = Path(tempfile.mkdtemp(prefix="jaxserve-suite-"))
    config = CONFIG | {"max_position_embeddings": CONTEXT}
    tensors = random_tensors(config)
    tensors["lm_head.weight"][config["eos_token_id"]] *= 1.6
    model = write_hf(directory / "m", config, tensors)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return model


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Of a suite's command: where its tests are, which files and options of pytest, and whether to
    write the page."""

    checkout: Path
    files: list[str]
    options: list[str]
    write: bool

    @classmethod
    def parse(cls, suite: Suite, given: list[str]) -> Arguments:
        checkout, *rest = given
        options = [each for each in rest if not each.endswith(".py")]
        write = "--write-compatibility" in options
        options = [each for each in options if each != "--write-compatibility"]
        files = [each for each in rest if each.endswith(".py")] or sorted(suite.reasons)
        return cls(Path(checkout).resolve(), files, options, write)


def run(suite: Suite, arguments: Arguments, options: list[str], plugins: list[object]) -> int:
    """The exit status of pytest, in the checkout."""
    os.chdir(arguments.checkout)
    paths = [f"{suite.root}/{file}" for file in arguments.files]
    recorder = Recorder(suite, Path.cwd() / suite.root, arguments.write)
    common = ["-p", "no:cacheprovider", "-o", "addopts=", "-rs", "--timeout=600"]
    common.append("--continue-on-collection-errors")
    return pytest.main(
        [*common, *options, *arguments.options, *paths], plugins=[recorder, *plugins]
    )


class Recorder:
    """Pytest's plugin: turns a run's results into cells of the page's table.

    A test counts once, whatever its parameters. It has passed if none of them failed, and some
    were not skipped.
    """

    def __init__(self, suite: Suite, root: Path, write: bool) -> None:
        self._suite, self._root, self._write = suite, root, write
        self._passed: dict[str, dict[str, bool]] = {}
        self._skipped: dict[str, set[str]] = {}
        self._faults: list[str] = []
        self._start = root

    def pytest_configure(self, config: pytest.Config) -> None:
        self._start = config.rootpath

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._faults.append(f"{report.nodeid or 'the checkout'} cannot be collected")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path = str((self._start / report.location[0]).relative_to(self._root))
        test = report.location[2].split("[")[0].rsplit(".", 1)[-1]
        tests = self._passed.setdefault(path, {})
        if report.failed:
            tests[test] = False
        elif report.passed and report.when == "call":
            tests.setdefault(test, True)
        elif report.skipped:
            self._skipped.setdefault(path, set()).add(test)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        for path, skipped in self._skipped.items():
            for test in skipped:
                self._passed[path].setdefault(test, False)
        for path, tests in self._passed.items():
            reasons = self._suite.reasons[path]
            for test, passed in tests.items():
                if not passed and not {test, REST} & reasons.keys():
                    self._faults.append(f"{path}::{test} does not pass, without a reason")
                if passed and test in reasons:
                    self._faults.append(f"{path}::{test} passes, and has a reason why not")
        session.exitstatus = 1 if self._faults or not self._passed else 0
        if self._write and not self._faults:
            self._write_page()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(self._suite.title)
        for path, tests in self._passed.items():
            terminalreporter.line(f"{path}: {_count(tests)} passed")
        for fault in self._faults:
            terminalreporter.line(fault, red=True)

    def _write_page(self) -> None:
        page = PAGE.read_text(encoding="utf-8")
        cells = passed_of(page, self._suite.name)
        cells |= {path: _count(tests) for path, tests in self._passed.items()}
        if missing := self._suite.reasons.keys() - cells:
            pytest.exit(f"the page is not written without {min(missing)}: run it too.", 1)
        tables = self._suite.table(cells)
        page = _place(self._suite.name).sub(lambda m: m[1] + tables + m[3], page)
        PAGE.write_text(page, encoding="utf-8")


def passed_of(page: str, name: str) -> dict[str, str]:
    """What passed of each file, from the page's table of a suite."""
    rows = re.findall(r"^\| `([^`]+)` \| (\d+ of \d+) \|", tables_of(page, name), re.M)
    return dict(rows)


def tables_of(page: str, name: str) -> str:
    """The page's tables of a suite."""
    return _place(name).search(page)[2]


def _count(tests: dict[str, bool]) -> str:
    return f"{sum(tests.values())} of {len(tests)}"


def _by_reason(reasons: dict[str, str]) -> str:
    tests: dict[str, list[str]] = {}
    for test, why in reasons.items():
        tests.setdefault(why, []).append("the others" if test == REST else f"`{test}`")
    told = [
        (", ".join(names) if len(names) <= MAX_NAMES else f"{len(names)} tests", why)
        for why, names in tests.items()
    ]
    return "; ".join(f"{names}: {why}" for names, why in told)


def _place(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name} -->\n)(.*?)(<!-- end of {name} -->)", re.DOTALL)
