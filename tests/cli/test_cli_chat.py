from __future__ import annotations

import json
import re
import shutil
import signal

from cli_command import SETTINGS
from patience import PATIENCE_S


def test_history_reset_and_exit(answer, command, tiny_model, tmp_path):
    settings = ("--model", tiny_model, *SETTINGS, "--max-tokens=12")
    settings += ("--trace-file", tmp_path / "trace.json")

    def chat(*lines):
        script = "".join(f"{line}\n" for line in lines)
        run = command("chat", *settings, stdin=script)
        assert run.status == 0, run.stderr
        return run

    forgotten = chat("hi", "/reset", "", "hi", "/exit", "never read")
    assert forgotten.stdout == answer.stdout * 2
    remembered = chat("hi", "/dance", "hi", "/quit", "never read")
    assert remembered.stdout.startswith(answer.stdout)
    assert remembered.stdout != answer.stdout * 2
    assert "/dance is not a command" in remembered.stderr
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_commands_about_the_conversation(answer, command, tiny_model):
    script = "/help\nhi\n/stats\n/system Be brief.\n/reset\nhi\n/system\n/reset\nhi\n"
    run = command("chat", "--model", tiny_model, *SETTINGS, "--max-tokens=12", stdin=script)
    assert run.status == 0, run.stderr
    assert run.stdout.startswith(answer.stdout) and run.stdout.endswith(answer.stdout)
    assert run.stdout != answer.stdout * 3
    assert "/system TEXT" in run.stderr
    assert re.search(r"^\d+ of 8,192 tokens of the context; so far 12 tokens, ", run.stderr, re.M)
    assert run.stderr.count("cut by --max-tokens 12.") == 3


def test_ctrl_c_stops_the_answer_only(command, tiny_model):
    process = command.start("chat", "--model", tiny_model, *SETTINGS, "--max-tokens=8000")
    process.stdin.write(b"hi\n")
    process.stdin.flush()
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(b"/dance\n/exit\n", timeout=PATIENCE_S)
    assert process.returncode == 0, error.decode()
    assert b"/dance is not a command" in error
    assert b"Traceback" not in error


def test_a_model_without_a_template(run_here, tiny_model, tmp_path):
    plain = tmp_path / "plain"
    shutil.copytree(tiny_model, plain, ignore=shutil.ignore_patterns("tokenizer_config.json"))
    run_here("chat", "--model", plain, *SETTINGS).assert_error("no chat template", "--raw")
