"""The job to launch, independent of the backend."""

from __future__ import annotations

import dataclasses
import re
import secrets
import shutil
import sys
from collections.abc import Sequence
from typing import Protocol

from jaxserve.core.errors import ConfigError

COORDINATOR_PORT = 8476
"""Of backends whose hosts have an address each."""

HERE = sys.executable
"""The interpreter on machines that share this machine's file system."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A command on several hosts.

    Attributes:
        command: what each host runs: a jaxserve command, a script, or -m and a module.
        hosts: number of processes, each one host of JAX's distributed runtime.
        devices_per_host: accelerators per host; on CPUs, virtual devices.
        accelerator: accelerator type to request from the cluster: the cluster's name of a GPU or
            TPU, or "gpu" for any GPU. Without it hosts use their CPUs.
        name: name of the job, in queues and file names.
        python: the interpreter on the hosts.
        port: port of the coordinator, on host 0.
        timeout_s: how long to wait for all hosts to join.
        shutdown_timeout: seconds a host gets to exit after it was asked to.
        independent: hosts do not join each other. Each runs the command on its own, with {host}
            replaced by its index, from 0, and {hosts} by the number of hosts.
    """

    command: tuple[str, ...]
    hosts: int | None = None
    devices_per_host: int | None = None
    accelerator: str | None = None
    name: str = "jaxserve"
    python: str | None = None
    port: int | None = None
    timeout_s: int = 300
    shutdown_timeout: int = 30
    independent: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that is invalid for every backend."""
        if not self.command:
            raise ConfigError("no command was given to launch; give one after --.")
        if self.command[0] == "launch":
            raise ConfigError("the command to launch is itself `launch`; give what it should run.")
        for name in ("hosts", "devices_per_host", "timeout_s", "shutdown_timeout"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more.")
        if self.port is not None and not 0 < self.port < 65536:
            raise ConfigError(f"port is {self.port}; it must be from 1 to 65535.")
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", self.name, re.ASCII):
            raise ConfigError(
                f"name is {self.name!r}; use letters, digits, -, _ and ., but not -, _ or . first."
            )

    def required_hosts(self) -> int:
        """Raises ConfigError if the number was not given."""
        if self.hosts is None:
            raise ConfigError("the number of hosts is not set; give --hosts N.")
        return self.hosts

    def required_devices(self, accelerators: str) -> int:
        """Raises ConfigError if the number per host was not given."""
        if self.devices_per_host is None:
            raise ConfigError(
                f"the number of {accelerators} per host is not set; give --devices-per-host D."
            )
        return self.devices_per_host

    def refuse(self, backend: str, *names: str) -> None:
        """Raises ConfigError for a given setting that `backend` would ignore."""
        for field in dataclasses.fields(self):
            if field.name in names and getattr(self, field.name) != field.default:
                option = "--" + field.name.replace("_", "-")
                raise ConfigError(f"{option} has no effect with backend {backend}; leave it out.")

    def command_on(self, host: int | str) -> tuple[str, ...]:
        """The command of one host."""
        if not self.independent:
            return self.command
        return tuple(
            argument.replace("{host}", str(host)).replace("{hosts}", str(self.hosts))
            for argument in self.command
        )

    def host_command(
        self,
        python: str,
        *,
        coordinator: str | None = None,
        host: int | str | None = None,
        stdin_line: bool = False,
    ) -> list[str]:
        """Arguments of one host's process. See `jaxserve.cli.host`.

        Args:
            python: the interpreter, unless the job sets one.
            coordinator: host 0's address, name:port; None if JAX detects the cluster.
            host: index of the host, or the backend's placeholder for it.
            stdin_line: whether the host exits at EOF of its stdin, which begins with
                `secret_line()` unless hosts are independent.

        Raises ConfigError for independent hosts whose indices only JAX could detect.
        """
        arguments = [self.python or python, "-m", "jaxserve.cli.host"]
        if self.independent:
            if host is None:
                raise ConfigError(
                    "--independent needs the launcher to number the hosts, but this backend "
                    "leaves that to JAX; start the command with the cluster's tools, such as "
                    "`srun jaxserve batch ... --shard $SLURM_PROCID/$SLURM_NTASKS`."
                )
            arguments += ["--independent"]
        elif coordinator is not None:
            arguments += [f"--coordinator={coordinator}", f"--num-hosts={self.hosts}"]
            arguments += [f"--host={host}"]
        if stdin_line and not self.independent:
            arguments += ["--secret-on-stdin"]
        if self.devices_per_host is not None:
            arguments += [f"--devices={self.devices_per_host}"]
        if not self.independent:
            arguments += [f"--timeout-s={self.timeout_s}"]
        if stdin_line:
            arguments += [f"--stdin-shutdown-timeout={self.shutdown_timeout}"]
        return [*arguments, "--", *(self.command if host is None else self.command_on(host))]


def new_secret() -> str:
    """A secret for one job, which its hosts prove to know when they join (rendezvous.py)."""
    return secrets.token_hex(32)


def secret_line() -> bytes:
    """A new secret as the first line of each host's stdin: other users of a machine can see a
    command line, and ssh does not forward the environment."""
    return f"{new_secret()}\n".encode()


def is_script(command: Sequence[str]) -> bool:
    """Whether a command starts with a Python file instead of a jaxserve command."""
    return command[0].endswith(".py") or "/" in command[0]


class Backend(Protocol):
    """Launches jobs on one kind of cluster."""

    def dry_run(self, job: Job) -> str:
        """What `run` would run or submit. Raises ConfigError as `run` does."""

    def run(self, job: Job) -> int:
        """Run the job to its end and return its exit status. Raises ConfigError."""


def require(tool: str, backend: str) -> None:
    """Raises ConfigError if the program `tool` is not installed."""
    if shutil.which(tool) is None:
        raise ConfigError(
            f"backend {backend} needs the program {tool!r}, which is not on PATH. Install it, "
            "or use --dry-run to see what would be run."
        )
