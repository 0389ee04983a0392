"""`jaxserve batch` as people run it: killed, stopped, refused, alone and on several hosts."""

from __future__ import annotations

import json
import random
import resource
import signal
import time
from pathlib import Path

import pytest
from batch_files import answers, errors, prompts, write_lines
from exhaustive import EXHAUSTIVE, combination, exhaustive
from patience import PATIENCE_S

from jaxserve.cli import main
from jaxserve.offline import run_batch

pytestmark = pytest.mark.interfaces

LINES, KILLS = 200, 12 if EXHAUSTIVE else 4


def wait_for(condition, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_killed_at_random_moments_each_line_is_there_once(batch, batch_llm, job_paths):
    """Two of the kills come while the process starts, the others after so many new lines and
    a moment more, the last ones close to the end."""
    lines, output = job_paths(LINES, max_tokens=40)
    expected = output.with_name("undisturbed.jsonl")
    run_batch(batch_llm, lines, expected)
    draw = random.Random(6)
    line_bytes = expected.stat().st_size / LINES
    for kill in range(KILLS):
        process = batch.start(lines, output)
        if kill in (0, KILLS // 2):
            time.sleep(draw.uniform(0, 4))
        else:
            left = expected.stat().st_size - size_of(output)
            share = 1.0 if kill >= KILLS - 3 else 1 / (KILLS - kill)
            enough = size_of(output) + min(draw.uniform(0, 2) * share, 0.95) * left - line_bytes
            while size_of(output) <= enough and process.poll() is None:
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.02))
        process.kill()
        process.wait()
    ended = batch(lines, output)
    assert ended.status == 0, ended.stderr
    assert f"{LINES} of {LINES}" in ended.stdout
    assert answers(output) == answers(expected)

    again = batch(lines, output)
    assert again.status == 0
    assert f"{LINES} of {LINES} lines are already done" in again.stderr
    assert "Loading" not in again.stderr, "nothing is loaded when nothing is left to do"


@pytest.mark.parametrize("number", [combination(signal.SIGINT), signal.SIGTERM])
def test_a_stopped_job_prints_how_to_resume(batch, batch_llm, job_paths, number: signal.Signals):
    lines, output = job_paths(LINES, max_tokens=40)
    process = batch.start(lines, output, "--report", output.with_name("report.html"))
    wait_for(lambda: size_of(output) > 0)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number, stderr
    assert "Run the same command again to resume" in stderr
    assert "Traceback" not in stderr
    done = len(answers(output))
    assert 0 < done < LINES
    assert f"{done} of {LINES}" in stdout
    report = output.with_name("report.html").read_text()
    assert f"{LINES - done} lines are left" in report
    assert f"<th>command</th><td>jaxserve batch {lines} {output} " in report
    run_batch(batch_llm, lines, output)
    assert len(answers(output)) == LINES


@exhaustive
def test_hosts_that_share_an_engine_stop_together(batch, batch_llm, job_paths):
    lines, output = job_paths(LINES, max_tokens=40)
    two = ("launch", "--hosts=2", "--devices-per-host=1", "--")
    process = batch.start(lines, output, "--pipeline-parallel-size=2", prefix=two)
    wait_for(lambda: size_of(output) > 0)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM, stderr
    assert "Run the same command again to resume" in stderr
    assert "Traceback" not in stderr
    assert 0 < len(answers(output)) < LINES
    run_batch(batch_llm, lines, output)
    assert len(answers(output)) == LINES


def test_hosts_share_the_work(batch, batch_llm, job_paths):
    """Two by the launcher, each with its own engine; and two that are one engine, after one of
    five has done its share. All as one host answers."""
    lines, output = job_paths(60)
    expected = output.with_name("alone.jsonl")
    run_batch(batch_llm, lines, expected)
    ended = batch(
        lines,
        output,
        "--shard={host}/{hosts}",
        prefix=("launch", "--hosts=2", "--independent", "--"),
    )
    assert ended.status == 0, ended.stderr
    assert answers(output) == answers(expected)
    assert sorted(path.name for path in output.parent.glob("out.jsonl*")) == [
        "out.jsonl",
        "out.jsonl.job",
    ]

    ended = batch(lines, output, prefix=("launch", "--hosts=2", "--"))
    assert ended.status == 1
    assert "launch --independent" in ended.stderr, ended.stderr

    together = output.with_name("together.jsonl")
    ended = batch(lines, together, "--shard=3/5")
    assert (ended.status, "shard is done" in ended.stderr) == (0, True), ended.stderr
    ended = batch(
        lines,
        together,
        "--pipeline-parallel-size=2",
        prefix=("launch", "--hosts=2", "--devices-per-host=1", "--"),
    )
    assert ended.status == 0, ended.stderr
    assert "12 of 60 lines are already done" in ended.stderr
    assert answers(together) == answers(expected)


def test_refusals_come_before_the_model_is_loaded(batch, job_paths, tmp_path: Path, capsys):
    lines, output = job_paths(3)
    taken = tmp_path / "notes.jsonl"
    taken.write_text("my notes\n")
    cases = [
        ((tmp_path / "missing.jsonl", output), "does not exist"),
        ((lines, tmp_path / "missing" / "out.jsonl"), "No such file or directory"),
        ((lines, tmp_path), "is a directory"),
        ((lines, taken), "is not the output of a batch job"),
        ((lines, output, "--report", tmp_path / "missing" / "report.html"), "existing directory"),
        ((lines, output, "--report", lines), "must end in .html"),
        ((lines, tmp_path / "out.html", "--report", tmp_path / "out.html"), "must end in .html"),
        ((lines, output, "--shard=2/2"), "the shard is 2/2"),
    ]
    for arguments, words in cases:
        assert main(["batch", *map(str, arguments), *batch.settings]) == 1
        told = capsys.readouterr().err
        assert words in told
        assert "Traceback" not in told and "Loading" not in told
    assert taken.read_text() == "my notes\n"

    assert batch(lines, output).status == 0
    ended = batch(lines, output, "--seed=1")
    assert ended.status == 1 and "seed was 0 and is 1" in ended.stderr
    write_lines(lines, prompts(4))
    ended = batch(lines, output)
    assert ended.status == 1 and "belongs to another job" in ended.stderr
    assert "Loading" not in ended.stderr


def test_broken_lines_and_duplicates_stop_nothing(batch, tmp_path: Path):
    good = {"custom_id": "good", "prompt": "a", "max_tokens": 2}
    chat = {"custom_id": "chat", "messages": [{"role": "user", "content": "hi"}]}
    own = chat | {"custom_id": "own", "chat_template": "{{ messages[0].content }}", "max_tokens": 2}
    lines = write_lines(tmp_path / "in.jsonl", [good, "{broken", good, b"\xff\x00", "", chat, own])
    ended = batch(
        *(lines, tmp_path / "out.jsonl", "--report", tmp_path / "report.html"),
        *("--trust-request-chat-template", "--reasoning-parser=none"),
    )
    assert ended.status == 0, ended.stderr
    assert "6 of 6" in ended.stdout and "invalid_line" in ended.stdout
    found = errors(tmp_path / "out.jsonl")
    assert {2: "invalid_line", 3: "duplicate_custom_id", 4: "invalid_line"}.items() <= found.items()
    assert 6 in found and 7 not in found, "this model has no chat template; line 7 brings one"
    assert "duplicate_custom_id" in (tmp_path / "report.html").read_text()


def test_a_full_disk_is_told_of_and_the_job_goes_on_later(batch, batch_llm, job_paths):
    lines, output = job_paths(60)
    limit = 8000
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:  # Inherited by the process; this one writes nothing meanwhile.
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        process = batch.start(lines, output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "make room and run the same command again" in stderr, stderr
    assert "Traceback" not in stderr
    kept = answers(output)
    assert 0 < len(kept) < 60 and output.stat().st_size <= limit
    run_batch(batch_llm, lines, output)
    found = answers(output)
    assert len(found) == 60 and kept.items() <= found.items()
    assert json.loads(output.with_name("out.jsonl.job").read_text())["lines"] == 60
