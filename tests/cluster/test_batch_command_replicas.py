"""`jaxserve batch --data-parallel-size` as people run it: killed replicas, Ctrl-C, refusals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from batch_files import answers, prompts, write_lines
from patience import PATIENCE_S
from server_process import SETTINGS, write_chat_model

from jaxserve.cli import main

LINES = 120


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--data-parallel-size=0"], "--data-parallel-size is 0; it must be 1 or more"),
        (["--data-parallel-size=2", "--trace-file=t.json"], "--trace-file is of one engine"),
    ],
)
def test_refusals(options, says, capsys, tmp_path):
    lines = write_lines(tmp_path / "in.jsonl", prompts(2))
    assert main(["batch", str(lines), str(tmp_path / "out.jsonl"), *options]) == 1
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [lines]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("batched"))


def start(model: Path, directory: Path, output: str, *options: str) -> subprocess.Popen[str]:
    """In a process group of its own, as a terminal does."""
    paths = [str(directory / "in.jsonl"), str(directory / output)]
    command = [sys.executable, "-m", "jaxserve", "batch", *paths, f"--model={model}"]
    return subprocess.Popen(
        [*command, *SETTINGS, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    return process.returncode, stdout, stderr


def replicas(process: subprocess.Popen[str]) -> list[int]:
    """The processes of Ray's actors below a process."""
    parents, found = {}, [process.pid]
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return [pid for pid in found if "ray::Replica" in named(pid)]


def named(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Fails with what the process said when it has ended, or takes too long, and the condition does
    not hold."""
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        if process.poll() is not None or time.monotonic() > give_up:
            process.terminate()  # Nothing, where it has ended.
            raise AssertionError(ended(process))
        time.sleep(0.05)


def until_gone(processes: list[int]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while left := [pid for pid in processes if named(pid)]:
        assert time.monotonic() < give_up, left
        time.sleep(0.05)


@pytest.mark.cluster
def test_killed_replicas_and_an_interrupt_cost_no_line(chat_model, tmp_path):
    """Both replicas are killed; then Ctrl-C at a terminal, which signals all
    processes of the group, while the job runs, and while replicas load."""
    pytest.importorskip("ray")
    write_lines(tmp_path / "in.jsonl", prompts(LINES, max_tokens=300))
    status, _, error = ended(start(chat_model, tmp_path, "one.jsonl"))
    assert status == 0, error
    output = tmp_path / "out.jsonl"
    two = ("--data-parallel-size=2", f"--report={tmp_path / 'report.html'}")

    loading = start(chat_model, tmp_path, "out.jsonl", *two)
    until(lambda: len(replicas(loading)) == 2, loading)
    processes = replicas(loading)
    os.killpg(loading.pid, signal.SIGINT)
    status, _, error = ended(loading)
    assert status == 130 and "Run the same command again to resume" in error, error
    assert "Traceback" not in error
    until_gone(processes)

    running = start(chat_model, tmp_path, "out.jsonl", *two)
    until(lambda: output.exists() and output.read_bytes().count(b"\n") >= 5, running)
    victims = replicas(running)
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    until(lambda: len(set(replicas(running)) - set(victims)) == 2, running)
    # Lines after these are of the new processes, so that the losses are known by then.
    before = output.read_bytes().count(b"\n")
    until(lambda: output.read_bytes().count(b"\n") > before + 3, running)
    processes = replicas(running)
    os.killpg(running.pid, signal.SIGINT)
    status, told, error = ended(running)
    assert status == 130, error
    assert "2, lost 2 times" in told and "Traceback" not in error
    until_gone(processes)
    done = len(answers(output))
    assert 5 < done < LINES
    report = (tmp_path / "report.html").read_text()
    assert "Replicas of this run" in report and "process " in report

    status, told, error = ended(start(chat_model, tmp_path, "out.jsonl", *two))
    assert status == 0, error
    assert f"{done} of {LINES} lines are already done" in error
    assert "2, lost 0 times" in told
    assert answers(output) == answers(tmp_path / "one.jsonl")


@pytest.mark.cluster
def test_more_replicas_than_cores(chat_model, tmp_path):
    pytest.importorskip("ray")
    write_lines(tmp_path / "in.jsonl", prompts(2))
    status, _, error = ended(start(chat_model, tmp_path, "out.jsonl", "--data-parallel-size=999"))
    assert status == 1
    assert "999 replicas take 1 core each, but Ray has" in error
    assert not (tmp_path / "out.jsonl").exists() or not (tmp_path / "out.jsonl").read_bytes()
