"""`jaxserve batch` in blocks of steps, which a disk that fails and a kill interrupt."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from batch_files import answers
from patience import PATIENCE_S
from tiny_engines import TinyModel

from jaxserve.offline import run_batch
from jaxserve.runtime.startup.loading import layer_file

pytestmark = pytest.mark.interfaces

BLOCKS = {"weights_on": "disk", "steps_per_weight_read": 3, "max_num_seqs": 7}
LINES = 60


def wait_for_more(output: Path, size: int = 0) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not (output.exists() and output.stat().st_size > size):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_disk_that_fails_and_a_kill_lose_no_line(tmp_path_factory, job_paths, batch_of):
    """The file of layers is cut while a job reads it, and the next run of the job is killed. Nearly
    all of the time they are within a block."""
    model = TinyModel.write_llama(tmp_path_factory.mktemp("deep"), num_hidden_layers=5)
    batch = batch_of(model, **BLOCKS)
    lines, output = job_paths(LINES, max_tokens=40)
    expected = output.with_name("undisturbed.jsonl")
    with model.load(**BLOCKS) as llm:
        run_batch(llm, lines, expected)
        file = layer_file(llm.plan().checkpoint, llm.plan().shapes)

    process = batch.start(lines, output)
    wait_for_more(output)
    os.truncate(file.path, file.num_bytes // 2)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert f"cannot be read from {file.path}" in stderr, stderr
    assert "delete the file, and start again" in stderr and "Traceback" not in stderr
    done = len(answers(output))
    assert 0 < done < LINES

    size = output.stat().st_size
    process = batch.start(lines, output)  # It writes the file anew.
    wait_for_more(output, size)
    process.kill()
    process.wait()
    with model.load(**BLOCKS) as llm:
        run = run_batch(llm, lines, output)
    assert 0 < run.done < LINES - done
    assert answers(output) == answers(expected)
