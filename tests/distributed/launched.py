"""`jaxserve launch` as a user runs it, on small scripts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from patience import PATIENCE_S

# All devices of all hosts add up their numbers, from 1.
SUM = """
import sys, jax
from jax.sharding import PartitionSpec as P
mesh = jax.make_mesh((jax.device_count(),), ("data",))
number = lambda: jax.lax.psum(jax.lax.axis_index("data") + 1, "data")
total = jax.jit(jax.shard_map(number, mesh=mesh, in_specs=(), out_specs=P()))
"""
PRINT_SUM = (
    SUM
    + """
print(total(), jax.device_count(), jax.process_count(), sys.argv[1:])
"""
)
# Hosts that are in collectives all the time, as an engine's are.
SUM_FOREVER = (
    SUM
    + """
import os
for step in range(10**9):
    total()
    if step == 0:
        print("pid", jax.process_index(), os.getpid(), file=sys.stderr)
"""
)


class Launched:
    """A launcher that runs, and what it and its hosts printed."""

    def __init__(self, *args: str | Path, cwd: Path) -> None:
        self._log = cwd / "launch.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jaxserve", "launch", *map(str, args)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=cwd,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
            )

    @property
    def stderr(self) -> str:
        return self._log.read_text()

    def end(self, timeout_s: float = PATIENCE_S) -> tuple[int, str]:
        """Its exit status, and standard output."""
        stdout, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, stdout.decode()

    def pids(self, hosts: int, timeout_s: float = PATIENCE_S) -> dict[int, int]:
        """Of the hosts, when all have printed `pid HOST PID`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = [line.split()[-2:] for line in self.stderr.splitlines() if "] pid " in line]
            if len(found) == hosts:
                return {int(host): int(pid) for host, pid in found}
            assert self.process.poll() is None, self.stderr
            time.sleep(0.05)
        raise AssertionError(self.stderr)

    def kill(self) -> None:
        """After a test that failed, for nothing may go on."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.stdout.close()


def ended(pids: dict[int, int], timeout_s: float = PATIENCE_S) -> bool:
    """Whether all these processes are gone, or soon are."""
    deadline = time.monotonic() + timeout_s
    while any(Path(f"/proc/{pid}").exists() and not _zombie(pid) for pid in pids.values()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
