"""A command that is told to stop, and started again."""

from __future__ import annotations

import json
import os
import signal

import pytest
from cli_command import SETTINGS
from exhaustive import combination
from patience import PATIENCE_S

pytestmark = pytest.mark.interfaces

LENGTH = "--max-tokens=1500"
SAMPLED = ("--temperature=1.0", LENGTH)


def stopped(command, *args):
    """What a command printed before SIGTERM, which is sent when it has begun to answer."""
    process = command.start(*args)
    first = process.stdout.read(20)
    process.send_signal(signal.SIGTERM)
    rest, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == os.EX_TEMPFAIL, error.decode()
    assert b"Traceback" not in error
    return (first + rest).decode("utf-8", "ignore")


@pytest.mark.parametrize("sampling", [combination((LENGTH,)), SAMPLED])
def test_an_answer_that_was_stopped_goes_on(command, tiny_model, tmp_path, sampling):
    args = ("generate", "hi", "--model", tiny_model, *SETTINGS, *sampling)
    kept = (*args, "--snapshot-dir", tmp_path)
    whole = command(*args)
    printed = [stopped(command, *kept), stopped(command, *kept)]
    last = command(*kept)
    assert last.status == 0, last.stderr
    assert last.stdout == whole.stdout
    for part in printed:
        assert whole.stdout.startswith(part.rstrip("\n\ufffd"))
    assert not list(tmp_path.iterdir())


def test_the_answer_to_something_else_is_not_taken_for_this_one(command, tiny_model, tmp_path):
    args = ("--model", tiny_model, *SETTINGS, LENGTH, "--snapshot-dir", tmp_path)
    stopped(command, "generate", "hi", *args)
    command("generate", "ho", *args).assert_error(str(tmp_path), "user: hi", "user: ho")
    assert command("generate", "hi", *args).status == 0


def test_the_snapshot_of_another_model_is_refused_with_both(command, tiny_model, tmp_path):
    args = ("generate", "hi", "--model", tiny_model, *SETTINGS, LENGTH)
    stopped(command, *args, "--snapshot-dir", tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    ours, manifest["facts"]["fingerprint"] = manifest["facts"]["fingerprint"], "0123"
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    command(*args, "--snapshot-dir", tmp_path).assert_error(ours, "0123")


def test_without_a_directory_sigterm_ends_the_process_as_ever(command, tiny_model):
    process = command.start("generate", "hi", "--model", tiny_model, *SETTINGS, LENGTH)
    process.stdout.read(1)
    process.terminate()
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGTERM
