"""Jobs over real ssh connections, to a server on this machine that goes by two names."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from launched import PRINT_SUM, SUM_FOREVER, ended
from patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = [
    pytest.mark.meshes,
    pytest.mark.skipif(SSHD is None, reason="there is no sshd on this machine"),
]


@pytest.fixture
def hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two hosts that `ssh` on the path reaches, with keys and settings made for it."""
    keys = tmp_path / "ssh"
    keys.mkdir(mode=0o700)
    for name in ("server", "user"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name]
        subprocess.run(command, check=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (keys / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {keys}/server\nPidFile none\n"
        f"AuthorizedKeysFile {keys}/user.pub\nStrictModes no\nUsePAM no\n"
        "PermitRootLogin prohibit-password\n"
        f'SetEnv PYTHONPATH="{ROOT}" JAX_PLATFORMS=cpu\n'
    )
    (keys / "config").write_text(
        f"Host *\nHostName 127.0.0.1\nPort {port}\nIdentityFile {keys}/user\nIdentitiesOnly yes\n"
        f"StrictHostKeyChecking no\nUserKnownHostsFile {keys}/known\nLogLevel ERROR\n"
    )
    program = keys / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {keys}/config "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    if getpass.getuser() == "root":
        Path("/run/sshd").mkdir(exist_ok=True)  # which a server run by root insists on
    with (keys / "sshd.log").open("wb") as log:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", keys / "sshd_config"], stderr=log)
    wait_for(port)
    hosts = tmp_path / "hosts"
    hosts.write_text(f"localhost\n{getpass.getuser()}@node-2\n")
    yield hosts
    server.terminate()
    server.wait(timeout=PATIENCE_S)


def wait_for(port: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def options(hostfile: Path) -> tuple[str, ...]:
    return ("--backend=ssh", f"--hostfile={hostfile}", f"--port={free_port()}")


def test_hosts_compute_together_and_host_0_prints_the_result(launch, options):
    job = launch(PRINT_SUM, *options, "--devices-per-host=2", arguments=("it's\n$HOME",))
    status, stdout = job.end()
    assert status == 0, job.stderr
    result = '10 4 2 ["it\'s\\n$HOME"]'
    assert stdout == result + "\n"
    assert f"[1] {result}" in job.stderr.splitlines()


def test_a_host_that_is_killed_ends_those_on_other_machines(launch, options):
    job = launch(SUM_FOREVER, *options)
    pids = job.pids(2)
    os.kill(pids[1], signal.SIGKILL)
    assert job.end()[0] != 0
    (error,) = [line for line in job.stderr.splitlines() if line.startswith("error:")]
    assert "host 1 " in error  # and host 0 may have ended of it
    assert ended(pids)


def test_ctrl_c_ends_hosts_on_other_machines(launch, options):
    job = launch(SUM_FOREVER, *options)
    pids = job.pids(2)
    job.process.send_signal(signal.SIGINT)
    assert job.end()[0] == 130
    assert ended(pids)
