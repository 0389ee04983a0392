from __future__ import annotations

import json
import re
import signal

from cli_command import CONTEXT, SETTINGS


def test_the_answer_is_all_of_stdout_and_the_summary_ends_stderr(answer):
    assert len(answer.stdout) > 1
    assert re.fullmatch(
        r"12 tokens, [\d.]+ tokens/s, first token after [\d.]+ s, on \S.*",
        answer.stderr.splitlines()[-1],
    )


def test_the_trace_file_is_a_timeline(answer, trace_file):
    events = json.loads(trace_file.read_text())["traceEvents"]
    assert any(event.get("ph") == "X" for event in events)


def test_a_raw_prompt_from_stdin_is_what_the_chat_template_makes(answer, command, tiny_model):
    run = command(
        *("generate", "-", "--raw", "--max-tokens=12", "--model", tiny_model, *SETTINGS),
        stdin="user: hi\nassistant:\n",
    )
    assert run.stdout == answer.stdout


def test_ctrl_c_keeps_what_was_generated(command, tiny_model):
    process = command.start("generate", "hi", "--model", tiny_model, *SETTINGS, "--max-tokens=8000")
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, error = process.communicate(timeout=60)
    lines = error.decode().splitlines()
    assert process.returncode == 130, lines
    assert first
    assert rest.endswith(b"\n")
    generated = re.match(r"(\d+) tokens, ", lines[-1])
    assert 0 < int(generated[1]) < 8000
    assert not any("Traceback" in line for line in lines)


def test_ctrl_c_during_startup(command, tiny_model):
    process = command.start("generate", "hi", "--model", tiny_model, *SETTINGS, "--page-size=32")
    process.stderr.readline()  # the weights are there, the programs of this page size are not
    process.send_signal(signal.SIGINT)
    stdout, error = process.communicate(timeout=60)
    assert process.returncode == 130, error.decode()
    assert stdout == b""
    assert b"Traceback" not in error


def test_a_reader_that_leaves_is_no_error(command, tiny_model):
    process = command.start("generate", "hi", "--model", tiny_model, *SETTINGS, "--max-tokens=8000")
    process.stdout.read(1)
    process.stdout.close()
    error = process.stderr.read().decode()
    process.stderr.close()
    process.stdin.close()
    assert process.wait(timeout=60) == 141
    assert "Traceback" not in error
    assert "Exception" not in error


def test_a_prompt_that_is_too_long(run_here, tiny_model):
    run = run_here("generate", "a" * (CONTEXT + 1), "--model", tiny_model, *SETTINGS)
    run.assert_error(str(CONTEXT))
    assert run.stdout == ""


def test_a_model_that_is_not_there(run_here, tmp_path):
    run = run_here("generate", "hi", "--model", tmp_path / "nothing")
    run.assert_error(str(tmp_path / "nothing"), ".gguf")


def test_a_trace_file_that_cannot_be_written(run_here, tiny_model, tmp_path):
    file = tmp_path / "no" / "trace.json"
    run = run_here("generate", "hi", "--model", tiny_model, "--trace-file", file)
    run.assert_error(str(file))
    assert "Loading weights" not in run.stderr
