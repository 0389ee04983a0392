"""The command line as such: help, version, arguments that mean nothing, progress."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading

import pytest

import jaxserve
from jaxserve.cli import main
from jaxserve.cli.progress import TerminalProgress

COMMANDS = ("generate", "chat", "bench", "plan", "compile", "convert")


def test_help_names_every_command_and_does_not_wait_for_jax():
    script = (
        "import sys\n"
        "from jaxserve.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print('JAX' if 'jax' in sys.modules else 'no JAX')"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert all(f"• {name} " in run.stdout for name in COMMANDS)
    assert "jaxserve generate" in run.stdout
    assert run.stdout.endswith("no JAX\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_explained(name, capsys):
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    explained = re.findall(r"(--[\w-]+) (?:\S*[A-Z{]\S* )?(.*?) ?\(default", text)
    assert all(words for _, words in explained), explained


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxserve {jaxserve.__version__}\n"


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["dance"], "dance"),
        (["generate"], "PROMPT"),
        (["generate", "hi", "--max-tokens", "many"], "many"),
        (["generate", "hi", "--temperature", "9"], "temperature"),
        (["generate", "hi", "--scheduler", "fifo"], "fifo"),
        (["bench", "offline", "--num-prompts", "0"], "num_prompts"),
    ],
)
def test_arguments_that_cannot_be_understood_are_named(args, named, capsys):
    with pytest.raises(SystemExit) as stop:
        main(args)
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert captured.out == ""


def test_progress_survives_threads_that_report_out_of_order(capsys):
    steps = list(range(1, 101))
    random.Random(0).shuffle(steps)
    with TerminalProgress() as progress:
        threads = [
            threading.Thread(
                target=lambda own: [progress("weights", s, 100) for s in own], args=(own,)
            )
            for own in (steps[::2], steps[1::2])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("Loading weights: done after ")
