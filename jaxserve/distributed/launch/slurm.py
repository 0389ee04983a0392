"""Slurm backend: a batch job, whose tasks JAX connects from Slurm's environment."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, NamedTuple

from jaxserve.core.errors import ConfigError, DistributedError
from jaxserve.distributed.launch.job import HERE, Job, require
from jaxserve.distributed.launch.processes import signals_to
from jaxserve.distributed.rendezvous import SECRET_VARIABLE

_POLL_S = 1.0
# How long slurmctld may be unavailable, such as during a restart.
_PATIENCE_S = 60.0
_ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}


@dataclasses.dataclass(frozen=True)
class Slurm:
    """A batch job with one task per host. Nodes must share this directory.

    Attributes:
        nodes: number of nodes; by default Slurm decides.
        partition: partition to submit to.
        account: account to charge.
        time: time limit, such as 2:00:00 or 1-12:00:00.
        sbatch_option: any other option of sbatch, such as --sbatch-option=--cpus-per-task=32;
            repeatable.
        wait: follow the job to its end; else print its id once it is submitted.
    """

    nodes: int | None = None
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    sbatch_option: tuple[str, ...] = ()
    wait: bool = True

    def dry_run(self, job: Job) -> str:
        hosts = job.required_hosts()
        # Slurm has its own time between SIGTERM and SIGKILL, KillWait.
        job.refuse("slurm", "port", "shutdown_timeout")
        options = [
            f"--job-name={job.name}",
            f"--output={job.name}-%j.log",
            f"--ntasks={hosts}",
            *self._placement(hosts),
            *_gpus(job),
            *(
                f"--{key}={value}"
                for key in ("partition", "account", "time")
                if (value := getattr(self, key)) is not None
            ),
            *self.sbatch_option,
        ]
        lines = ["#!/bin/sh", *(f"#SBATCH {_escaped(option)}" for option in options)]
        lines += [
            f'logs="{job.name}-$SLURM_JOB_ID"',
            'mkdir -p "$logs"',
            # The tasks inherit the environment, which no other user can read.
            f"{SECRET_VARIABLE}=$(od -An -v -N32 -tx1 /dev/urandom | tr -d ' \\n')",
            f"export {SECRET_VARIABLE}",
            # Slurm binds each task to one core unless told otherwise.
            "exec srun --kill-on-bad-exit=1 --cpu-bind=none --input=none \\",
            '  --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \\',
            '  --output="$logs/%t.out" --error="$logs/%t.err" \\',
            f"  {shlex.join(job.host_command(HERE))}",
        ]
        return "\n".join(lines) + "\n"

    def run(self, job: Job) -> int:
        script = self.dry_run(job)
        require("sbatch", "slurm")
        number = _submit(script)
        if not self.wait:
            print(number)
            return 0
        print(f"Slurm job {number}", file=sys.stderr)
        return _follow(number, job)

    def _placement(self, hosts: int) -> list[str]:
        if self.nodes is None:
            return []
        if self.nodes < 1 or hosts % self.nodes:
            raise ConfigError(
                f"nodes is {self.nodes} and hosts {hosts}; nodes must be at least 1 and "
                "divide hosts."
            )
        return [f"--nodes={self.nodes}", f"--ntasks-per-node={hosts // self.nodes}"]


def _gpus(job: Job) -> list[str]:
    if job.accelerator is None:
        return []
    kind = "" if job.accelerator == "gpu" else f"{job.accelerator}:"
    return [f"--gpus-per-task={kind}{job.required_devices('GPUs')}"]


def _escaped(option: str) -> str:
    """An option quoted for an #SBATCH line.

    Raises ConfigError for anything that sbatch would not read as one option.
    """
    if not option.startswith("-") or "\n" in option or "\0" in option:
        raise ConfigError(f"{option!r} is not an option of sbatch; give one as --name=value.")
    if re.fullmatch(r"[\w.,:/@%+=~-]+", option, re.ASCII):
        return option
    return '"' + re.sub(r'(["\\])', r"\\\1", option) + '"'


def _submit(script: str) -> str:
    """Submit the script and return the job id."""
    done = subprocess.run(
        ["sbatch", "--parsable"],
        input=script.encode("utf-8", "surrogateescape"),
        capture_output=True,
    )
    if done.returncode != 0:
        raise DistributedError(f"sbatch rejected the job: {done.stderr.decode().strip()}")
    return done.stdout.decode().strip().partition(";")[0]


def _follow(number: str, job: Job) -> int:
    """Forward the hosts' output until the job ends, and return its exit status.

    A signal cancels the job, as does a broken stdout pipe; a second signal stops waiting for the
    job to end.
    """
    logs = _Logs(number, job)
    signals: list[signal.Signals] = []
    cancelled = False
    with signals_to(signals.append), contextlib.closing(logs):
        while True:
            state = _state(number)
            try:
                logs.copy()  # Complete once the job has ended, as its state was read first.
            except BrokenPipeError:
                subprocess.run(["scancel", number], check=False)
                raise
            if state.name in _ENDED or len(signals) > 1:
                break
            if signals and not cancelled:
                print(f"{signals[0].name}: cancelling Slurm job {number}.", file=sys.stderr)
                subprocess.run(["scancel", number], check=False)
                cancelled = True
            time.sleep(_POLL_S)
    if signals:
        return 128 + signals[0]
    if state.name != "COMPLETED":
        print(f"error: Slurm job {number} ended as {state.name}.", file=sys.stderr)
        return state.status or 1
    return 0


class _State(NamedTuple):
    name: str
    status: int


def _state(number: str) -> _State:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        done = subprocess.run(
            ["scontrol", "--oneliner", "show", "job", number], capture_output=True, text=True
        )
        found = re.search(r"JobState=(\w+).*?ExitCode=(\d+):(\d+)", done.stdout)
        if found:
            status, signal_number = int(found[2]), int(found[3])
            return _State(found[1], 128 + signal_number if signal_number else status)
        if time.monotonic() > deadline:
            raise DistributedError(
                f"Slurm returned no state of job {number}: {done.stderr.strip()}. It may still run."
            )
        time.sleep(_POLL_S)


class _Logs:
    """Tails the log files of the tasks: host 0's stdout to stdout, the rest, prefixed with the
    host's index, to stderr."""

    def __init__(self, number: str, job: Job) -> None:
        directory = Path(f"{job.name}-{number}")
        self._files = [_Log(Path(f"{job.name}-{number}.log"), b"", sys.stderr.buffer)]
        for host in range(job.required_hosts()):
            prefix = f"[{host}] ".encode()
            if host == 0:
                self._files.append(_Log(directory / "0.out", b"", sys.stdout.buffer))
            else:
                self._files.append(_Log(directory / f"{host}.out", prefix, sys.stderr.buffer))
            self._files.append(_Log(directory / f"{host}.err", prefix, sys.stderr.buffer))

    def copy(self) -> None:
        for file in self._files:
            file.copy()

    def close(self) -> None:
        for file in self._files:
            file.close()


class _Log:
    def __init__(self, path: Path, prefix: bytes, to: IO[bytes]) -> None:
        self._path, self._prefix, self._to = path, prefix, to
        self._stream: IO[bytes] | None = None
        self._rest = b""

    def copy(self) -> None:
        """Copy new output; only whole lines if they get a prefix."""
        if self._stream is None:
            if not self._path.exists():
                return
            self._stream = self._path.open("rb")
        new = self._rest + self._stream.read()
        if self._prefix:
            *lines, self._rest = new.split(b"\n")
            new = b"".join(self._prefix + line + b"\n" for line in lines)
        if new:
            self._to.write(new)
            self._to.flush()

    def close(self) -> None:
        if self._stream is None:
            return
        self._stream.close()
        if self._rest:
            self._to.write(self._prefix + self._rest + b"\n")
            self._to.flush()
