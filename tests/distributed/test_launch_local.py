"""Jobs of several processes on this machine: what they print, and how they end."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest
from exhaustive import combination
from launched import PRINT_SUM, SUM_FOREVER, ended
from patience import PATIENCE_S

pytestmark = pytest.mark.meshes


@pytest.mark.parametrize(("hosts", "devices"), [(2, 2), combination(4, 1)])
def test_hosts_compute_together_and_host_0_prints_the_result(launch, hosts, devices):
    arguments = ("a b", "--", "it's\n$HOME")
    job = launch(
        PRINT_SUM, f"--hosts={hosts}", f"--devices-per-host={devices}", arguments=arguments
    )
    status, stdout = job.end()
    assert status == 0, job.stderr
    result = f"10 4 {hosts} {list(arguments)}"
    assert stdout == result + "\n"
    for host in range(1, hosts):
        assert f"[{host}] {result}" in job.stderr.splitlines()


# One engine on all hosts, with requests that run when `pid` is printed, and after.
GENERATE_FOREVER = """
import os, sys, jax
from jaxserve import LLM, SamplingParams
settings = {"max_num_seqs": 2, "max_num_batched_tokens": 18, "page_size": 8}
with LLM(sys.argv[1], tensor_parallel_size=jax.device_count(), **settings) as llm:
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    deltas = llm.stream("abc", params)
    next(deltas)
    print("pid", jax.process_index(), os.getpid(), file=sys.stderr)
    while True:
        for _ in deltas:
            pass
        deltas = llm.stream("abc", params)
"""


@pytest.mark.parametrize(
    ("hosts", "victim"), [(2, 0), (2, 1), combination(4, 0), combination(4, 3)]
)
def test_a_host_that_is_killed_ends_the_job_and_is_named(launch, llama, hosts, victim):
    patient = f"--shutdown-timeout={PATIENCE_S}"  # All end by themselves, however long it takes.
    job = launch(GENERATE_FOREVER, f"--hosts={hosts}", patient, arguments=(str(llama.path),))
    pids = job.pids(hosts)
    os.kill(pids[victim], signal.SIGKILL)
    status, _ = job.end()
    assert status == 128 + signal.SIGKILL
    # Others may have ended of it already, and are then named after it.
    (error,) = [line for line in job.stderr.splitlines() if line.startswith("error:")]
    assert error.startswith(f"error: host {victim} was ended by SIGKILL"), job.stderr
    assert "killed." not in job.stderr
    assert ended(pids)


def test_a_host_that_fails_does_not_wait_for_the_others(launch):
    """At exit JAX waits for all hosts, and the others wait in a collective for this one."""
    job = launch(
        SUM_FOREVER.replace("total()", "assert step < 3 or jax.process_index() != 1; total()"),
        "--hosts=2",
    )
    pids = job.pids(2)
    status, _ = job.end()
    assert status == 1
    assert "[1] AssertionError" in job.stderr
    (error,) = [line for line in job.stderr.splitlines() if line.startswith("error:")]
    assert "host 1 failed with exit status 1" in error  # and host 0 may have, of that
    assert ended(pids)


def test_a_signal_ends_all_hosts(launch):
    job = launch(SUM_FOREVER, "--hosts=2")
    pids = job.pids(2)
    job.process.send_signal(signal.SIGTERM)
    status, _ = job.end()
    assert status == 128 + signal.SIGTERM
    assert "SIGTERM: ending hosts 0, 1." in job.stderr
    assert ended(pids)


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("asked", file=sys.stderr))
child = subprocess.Popen(["sleep", "600"])
print("pid", sys.argv[1], child.pid, file=sys.stderr)
print("pid", 0, os.getpid(), file=sys.stderr)
while True:
    time.sleep(600)
"""


def test_hosts_that_do_not_end_are_killed_with_what_they_started(launch):
    job = launch(STUBBORN, "--hosts=1", "--shutdown-timeout=1", arguments=("1",))
    pids = job.pids(2)
    job.process.send_signal(signal.SIGINT)
    status, _ = job.end()
    assert status == 130
    assert "[0] asked" in job.stderr.splitlines()
    assert "host 0 did not end within 1 s: killed." in job.stderr
    assert ended(pids)


def test_a_second_signal_kills_at_once(launch):
    job = launch(STUBBORN, "--hosts=1", "--shutdown-timeout=600", arguments=("1",))
    pids = job.pids(2)
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    job.process.send_signal(signal.SIGINT)
    assert job.end()[0] == 130
    assert ended(pids)


def test_hosts_that_were_stopped_leave_together(launch):
    """One that has more to do is not ended by JAX because host 0 is gone."""
    job = launch(
        PRINT_SUM + "import time\ntime.sleep(3 * jax.process_index())\nsys.exit(75)", "--hosts=2"
    )
    status, _ = job.end()
    assert status == 75, job.stderr
    assert "host 1 failed with exit status 75" in job.stderr, job.stderr


def test_hosts_end_when_the_launcher_is_killed(launch):
    job = launch(SUM_FOREVER, "--hosts=2")
    pids = job.pids(2)
    job.process.kill()
    assert ended(pids)


def test_a_port_that_is_taken_is_refused_at_once(launch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        job = launch(PRINT_SUM, "--hosts=2", f"--port={port}")
        assert job.end() == (1, "")
    assert f"port {port} of 127.0.0.1 cannot be used" in job.stderr


def test_a_command_of_jaxserve_and_a_module_run_too(launch_command, tmp_path):
    job = launch_command("--hosts=1", "--", "plan", "./none.gguf")
    assert job.end() == (1, "")
    assert "[0] error: " in job.stderr
    assert "none.gguf" in job.stderr
    (tmp_path / "job.py").write_text("import sys\nprint(__name__, sys.argv[1:])\n")
    job = launch_command("--hosts=1", "--", "-m", "job", "--x")
    assert job.end() == (0, "__main__ ['--x']\n")


def test_a_script_that_is_missing_is_named(launch_command, tmp_path):
    job = launch_command("--hosts=1", "--", "none.py")
    assert job.end() == (1, "")
    assert f"[0] error: there is no script 'none.py' in {tmp_path}" in job.stderr
