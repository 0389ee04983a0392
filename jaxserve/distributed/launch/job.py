"""What is launched, whatever launches it."""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Protocol

from jaxserve.errors import ConfigError

HERE = sys.executable
"""The interpreter on machines that share this one's files."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A command on several hosts.

    Attributes:
        command: what each host runs: a command of jaxserve, a script, or -m and a module.
        hosts: processes, each of which is one host of JAX's distributed runtime.
        devices_per_host: accelerators of each host; on CPUs, virtual devices.
        accelerator: the kind that a cluster is asked for: a GPU's or TPU's name as the cluster
            spells it, or "gpu" for any GPU. Without it hosts compute on their CPUs.
        name: of the job, in queues and of its files.
        python: the interpreter on the hosts.
        port: of the coordinator, on host 0.
        timeout_s: how long the hosts may take to come together.
        grace_s: how long a host that is asked to end may take.
        separate: hosts do not join one another. Each runs the command by itself, in which {host}
            becomes its number, from 0, and {hosts} how many they are.
    """

    command: tuple[str, ...]
    hosts: int | None = None
    devices_per_host: int | None = None
    accelerator: str | None = None
    name: str = "jaxserve"
    python: str | None = None
    port: int | None = None
    timeout_s: int = 300
    grace_s: int = 30
    separate: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that no backend could use."""
        if not self.command:
            raise ConfigError("there is no command to launch; give one after --.")
        if self.command[0] == "launch":
            raise ConfigError("the command to launch is itself `launch`; give what it should run.")
        for name in ("hosts", "devices_per_host", "timeout_s", "grace_s"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be 1 or more.")
        if self.port is not None and not 0 < self.port < 65536:
            raise ConfigError(f"port is {self.port}; it must be from 1 to 65535.")
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", self.name, re.ASCII):
            raise ConfigError(
                f"name is {self.name!r}; use letters, digits, and -, _ or . within them."
            )

    def required_hosts(self) -> int:
        """Raises ConfigError when the number was not given."""
        if self.hosts is None:
            raise ConfigError("the number of hosts is not known; give --hosts N.")
        return self.hosts

    def required_devices(self, accelerators: str) -> int:
        """Raises ConfigError when the number for each host was not given."""
        if self.devices_per_host is None:
            raise ConfigError(
                f"the number of {accelerators} of each host is not known; give "
                "--devices-per-host D."
            )
        return self.devices_per_host

    def refuse(self, backend: str, *names: str) -> None:
        """Raises ConfigError when a setting was given that `backend` could only ignore."""
        for field in dataclasses.fields(self):
            if field.name in names and getattr(self, field.name) != field.default:
                option = "--" + field.name.replace("_", "-")
                raise ConfigError(f"{option} means nothing to backend {backend}; leave it out.")

    def command_on(self, host: int | str) -> tuple[str, ...]:
        """What a host runs."""
        if not self.separate:
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
            python: the interpreter, where the job names none.
            coordinator: host 0's address, name:port; None where JAX finds it, and the rest.
            host: number of the host, or what the backend replaces by it.
            stdin_line: whether the host ends with its standard input.

        Raises ConfigError for separate hosts whose numbers only JAX would find.
        """
        arguments = [self.python or python, "-m", "jaxserve.cli.host"]
        if self.separate:
            if host is None:
                raise ConfigError(
                    "--separate hosts are told their numbers by the launcher, and this backend "
                    "leaves that to JAX; start the command by the cluster's own means, such as "
                    "`srun jaxserve batch ... --shard $SLURM_PROCID/$SLURM_NTASKS`."
                )
            arguments += ["--separate"]
        elif coordinator is not None:
            arguments += [f"--coordinator={coordinator}", f"--num-hosts={self.hosts}"]
            arguments += [f"--host={host}"]
        if self.devices_per_host is not None:
            arguments += [f"--devices={self.devices_per_host}"]
        if not self.separate:
            arguments += [f"--timeout-s={self.timeout_s}"]
        if stdin_line:
            arguments += [f"--stdin-grace-s={self.grace_s}"]
        return [*arguments, "--", *(self.command if host is None else self.command_on(host))]


def is_script(command: Sequence[str]) -> bool:
    """Whether a command starts with a file of Python, and not with a command of jaxserve."""
    return command[0].endswith(".py") or "/" in command[0]


class Backend(Protocol):
    """How a job is started somewhere."""

    def dry_run(self, job: Job) -> str:
        """What `run` would run or submit. Raises ConfigError as `run` does."""

    def run(self, job: Job) -> int:
        """Run the job to its end and return its exit status. Raises ConfigError."""


def require(tool: str, backend: str) -> None:
    """Raises ConfigError when the program `tool` is not installed here."""
    if shutil.which(tool) is None:
        raise ConfigError(
            f"backend {backend} needs the program {tool!r}, which is not on the path. Install it, "
            "or see by --dry-run what it would be told."
        )
