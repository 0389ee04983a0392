from __future__ import annotations

import io
import json
import re
import signal
import sys

import pytest
from cli_command import CONTEXT, SETTINGS
from patience import PATIENCE_S


def test_the_answer_is_all_of_stdout_and_the_summary_ends_stderr(answer):
    assert len(answer.stdout) > 1
    assert re.fullmatch(
        r"12 tokens, [\d.]+ tokens/s, first token after [\d.]+ s, on \S.*",
        answer.stderr.splitlines()[-1],
    )
    assert answer.stderr.splitlines()[-2] == "The answer was cut by --max-tokens 12."


def test_the_trace_file_is_a_timeline(answer, trace_file):
    events = json.loads(trace_file.read_text())["traceEvents"]
    assert any(event.get("ph") == "X" for event in events)


@pytest.mark.parametrize("dash", [["-"], []])
def test_a_raw_prompt_from_stdin_is_what_the_chat_template_makes(answer, command, tiny_model, dash):
    run = command(
        *("generate", *dash, "--raw", "--max-tokens=12", "--model", tiny_model, *SETTINGS),
        stdin="user: hi\nassistant:\n",
    )
    assert run.stdout == answer.stdout


def test_no_prompt_at_all(run_here, tiny_model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    for prompt in ([], [""]):
        run = run_here("generate", *prompt, "--model", tiny_model)
        run.assert_error("no prompt", "through a pipe")


def test_a_system_prompt_and_answers_as_json(run_here, tiny_model):
    args = ("generate", "hi", "--model", tiny_model, *SETTINGS, "--max-tokens=6", "--json")
    (plain, with_system) = (run_here(*args), run_here(*args, "--system=Be brief."))
    told = [json.loads(run.stdout) for run in (plain, with_system)]
    assert told[1]["prompt_tokens"] - told[0]["prompt_tokens"] == len("system: Be brief.\n")
    (answer,) = told[0]["answers"]
    assert answer["finish_reason"] == "length"
    assert len(answer["token_ids"]) == told[0]["output_tokens"] == 6
    assert 0 < told[0]["time_to_first_token_s"] <= told[0]["time_s"]


def test_several_answers(run_here, tiny_model):
    sampled = ("--temperature=1", "--seed=1", "-n", "3", "--max-tokens=6")
    args = ("generate", "hi", "--model", tiny_model, *SETTINGS, *sampled)
    told = json.loads(run_here(*args, "--json").stdout)["answers"]
    assert len({tuple(answer["token_ids"]) for answer in told}) == 3
    texts = [f"[{number}/3]\n{answer['text']}\n" for number, answer in enumerate(told, 1)]
    shown = run_here(*args)
    assert shown.stdout == "".join(texts)
    cut = sum(answer["finish_reason"] == "length" for answer in told)
    assert f"{cut} of 3 answers were cut by --max-tokens 6.\n" in shown.stderr
    equal = "At temperature 0 all answers are equal"
    assert equal not in shown.stderr
    assert equal in run_here(*args[:-5], "--temperature=0", "-n=2", "--max-tokens=1").stderr


def test_debug_messages_are_those_of_the_engine(run_here, tiny_model, caplog):
    with caplog.at_level("DEBUG", logger="jaxserve"):
        args = ("--model", tiny_model, *SETTINGS, "--max-tokens=2", "--log-level=debug")
        assert run_here("generate", "hi", *args).status == 0
    levels = {record.levelname for record in caplog.records if record.name.startswith("jaxserve.")}
    assert levels == {"DEBUG", "INFO"}
    text = caplog.text
    assert f"loading {tiny_model}" in text
    assert re.search(r"tiny \(LlamaForCausalLM, float32\) on 1 x cpu: weights .* after", text)
    assert "Phase(" in text and "Arrived(" in text and "Finished(" in text


def test_ctrl_c_keeps_what_was_generated(command, tiny_model):
    process = command.start("generate", "hi", "--model", tiny_model, *SETTINGS, "--max-tokens=8000")
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    rest, error = process.communicate(timeout=PATIENCE_S)
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
    stdout, error = process.communicate(timeout=PATIENCE_S)
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
    assert process.wait(timeout=PATIENCE_S) == 141
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
