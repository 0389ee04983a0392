"""Which host is named when one fails, and when others fail of it."""

from __future__ import annotations

import signal
import sys

import pytest
from patience import PATIENCE_S

from jaxserve.distributed.launch import processes
from jaxserve.distributed.launch.processes import HostProcess, run_together

FAILS = "raise SystemExit(3)"
IS_KILLED = "import os; os.kill(os.getpid(), 9)"
ABORTS = "import os; os.abort()"
WAITS = "import sys; sys.stdin.read()"
FIRST = """
import os
open(os.environ["FIRST"] + "_", "w").write(str(os.getpid()))
os.rename(os.environ["FIRST"] + "_", os.environ["FIRST"])
"""
AFTER_IT = """
import os, time
first = os.environ["FIRST"]
while not os.path.exists(first) or os.path.exists("/proc/" + open(first).read()):
    time.sleep(0.01)
time.sleep(0.2)
"""
"""Ends a moment after the first one, however long each takes to start."""


@pytest.mark.parametrize(
    "hosts, said, status",
    [
        ([WAITS, FAILS], "error: host 1 failed with exit status 3; ending host 0.", 3),
        ([IS_KILLED], "error: host 0 was ended by SIGKILL.", 128 + signal.SIGKILL),
        # Host 0 ends of the loss of host 1 before the launcher learns of that.
        (
            [FIRST + FAILS, AFTER_IT + IS_KILLED, WAITS],
            "error: host 1 was ended by SIGKILL and host 0 failed with exit status 3; "
            "ending host 2.",
            128 + signal.SIGKILL,
        ),
        (
            [AFTER_IT + FAILS, FIRST + FAILS],
            "error: host 1 failed with exit status 3 and host 0 failed with exit status 3.",
            3,
        ),
        # JAX aborts a host that has lost host 0, which is no signal from outside.
        (
            [FIRST + FAILS, AFTER_IT + ABORTS],
            "error: host 0 failed with exit status 3 and host 1 was ended by SIGABRT.",
            3,
        ),
        (
            [FIRST + ABORTS, AFTER_IT + IS_KILLED],
            "error: host 1 was ended by SIGKILL and host 0 was ended by SIGABRT.",
            128 + signal.SIGKILL,
        ),
        ([FIRST, AFTER_IT], "", 0),
    ],
)
def test_who_failed(capfd, tmp_path, monkeypatch, hosts, said, status):
    if WAITS not in hosts:  # So it takes no longer.
        monkeypatch.setattr(processes, "_TOGETHER_S", PATIENCE_S)
    first = {"FIRST": str(tmp_path / "first")}
    started = [HostProcess([sys.executable, "-S", "-c", source], first) for source in hosts]
    assert run_together(started, shutdown_timeout=PATIENCE_S) == status
    assert capfd.readouterr().err.splitlines() == [said] * bool(said)


def test_a_host_reads_its_input_and_then_waits(capfd):
    """Its command line, which others can see, does not have the input."""
    reads = "import sys; assert sys.stdin.readline() == 'secret\\n'; sys.stdin.read()"
    host = HostProcess([sys.executable, "-S", "-c", reads], stdin=b"secret\n")
    fails = HostProcess([sys.executable, "-S", "-c", FAILS])
    assert "secret" not in str(host._replace(argv=["host"]))
    assert run_together([host, fails], shutdown_timeout=PATIENCE_S) == 3
    said = "error: host 1 failed with exit status 3; ending host 0."
    assert capfd.readouterr().err.splitlines() == [said]
