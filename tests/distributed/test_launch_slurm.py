"""Jobs of a real Slurm with one node, which `.ci/slurm.sh` starts: two tasks are two hosts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from launched import PRINT_SUM, SUM_FOREVER, ended
from patience import PATIENCE_S
from tiny_checkpoints import CONFIG, random_tensors, write_hf

pytestmark = pytest.mark.slurm
OPTIONS = ("--backend=slurm", "--hosts=2")


def shown(number: str) -> str:
    """What Slurm says of a job."""
    command = ["scontrol", "--oneliner", "show", "job", number]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def number_of(job) -> str:
    [line] = [line for line in job.stderr.splitlines() if line.startswith("Slurm job ")]
    return line.split()[-1]


def test_tasks_find_one_another_and_host_0_prints_the_result(launch):
    comment = 'a b\'s \\ "q" # x'
    job = launch(
        PRINT_SUM,
        *(*OPTIONS, "--devices-per-host=2", "--nodes=1", f"--sbatch-option=--comment={comment}"),
        arguments=("a b", "it's\n$HOME"),
    )
    status, stdout = job.end(timeout_s=180)
    assert status == 0, job.stderr
    result = '10 4 2 ["a b", "it\'s\\n$HOME"]'.replace('["a b", ', "['a b', ")
    assert stdout == result + "\n"
    assert f"[1] {result}" in job.stderr.splitlines()
    assert f" Comment={comment} " in shown(number_of(job))


def test_two_tasks_generate_what_one_process_does(launch_command, tmp_path):
    model = write_hf(tmp_path / "tiny", CONFIG, random_tensors(CONFIG))
    settings = ("--model", model, "--max-num-batched-tokens=33", "--page-size=64")
    generate = ("generate", "hi", "--raw", "--max-tokens=8", *map(str, settings))
    alone = subprocess.run(
        [sys.executable, "-m", "jaxserve", *generate], capture_output=True, timeout=300
    )
    assert alone.returncode == 0, alone.stderr.decode()
    job = launch_command(*OPTIONS, "--", *generate, "--tensor-parallel-size=2")
    status, stdout = job.end(timeout_s=300)
    assert status == 0, job.stderr
    assert len(stdout) > 1
    assert stdout == alone.stdout.decode()


def test_a_host_that_fails_ends_the_job(launch):
    script = SUM_FOREVER.replace("total()", "assert step < 3 or jax.process_index() != 1; total()")
    job = launch(script, *OPTIONS)
    pids = job.pids(2)
    status, _ = job.end()
    assert status != 0
    assert "[1] AssertionError" in job.stderr
    assert f"error: Slurm job {number_of(job)} ended as FAILED." in job.stderr
    assert ended(pids)


def test_ctrl_c_cancels_the_job(launch):
    job = launch(SUM_FOREVER, *OPTIONS)
    pids = job.pids(2)
    job.process.send_signal(signal.SIGINT)
    assert job.end()[0] == 130
    assert f"SIGINT: cancelling Slurm job {number_of(job)}." in job.stderr
    assert ended(pids)
    assert "JobState=CANCELLED" in shown(number_of(job))


def test_a_broken_stdout_pipe_cancels_the_job(launch):
    job = launch(SUM_FOREVER + "    print(step)\n", *OPTIONS)
    job.pids(2)
    job.process.stdout.close()
    assert job.process.wait(timeout=PATIENCE_S) == 141
    deadline = time.monotonic() + PATIENCE_S
    while "JobState=CANCELLED" not in shown(number_of(job)):
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_what_sbatch_refuses_is_told(launch):
    job = launch("", *OPTIONS, "--partition=none-such")
    assert job.end() == (1, "")
    assert "error: sbatch rejected the job: " in job.stderr
    assert "none-such" in job.stderr or "invalid partition" in job.stderr.lower()
