"""SSH backend: hosts listed in a file."""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path

from jaxserve.core.errors import ConfigError
from jaxserve.distributed.launch.job import COORDINATOR_PORT, HERE, Job, require, secret_line
from jaxserve.distributed.launch.processes import HostProcess, run_together

# Passwords cannot be entered, and lost hosts must be detected.
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=30", "-o", "ServerAliveInterval=15")


@dataclasses.dataclass(frozen=True)
class Ssh:
    """One ssh connection per host. Hosts must have the same files at the same paths.

    Attributes:
        hostfile: a file with one host per line, as `name` or `user@name`; # starts a comment. All
            hosts must reach the first host by that name.
    """

    hostfile: Path | None = None

    def dry_run(self, job: Job) -> str:
        return "".join(f"{host}\n" for host in self._hosts(job))

    def run(self, job: Job) -> int:
        hosts = self._hosts(job)
        require("ssh", "ssh")
        return run_together(hosts, job.shutdown_timeout)

    def _hosts(self, job: Job) -> list[HostProcess]:
        job.refuse("ssh", "accelerator")
        names = self._names()
        if job.hosts not in (None, len(names)):
            raise ConfigError(
                f"{self.hostfile} lists {len(names)} hosts, but --hosts is {job.hosts}; give the "
                "same number, or leave out --hosts."
            )
        job = dataclasses.replace(job, hosts=len(names))
        coordinator = f"{names[0].rpartition('@')[2]}:{job.port or COORDINATOR_PORT}"
        commands = [
            job.host_command(HERE, coordinator=coordinator, host=host, stdin_line=True)
            for host in range(len(names))
        ]
        here, secret = shlex.quote(os.getcwd()), secret_line()
        return [
            HostProcess(
                [*_SSH, "--", name, f"cd {here} && exec {shlex.join(command)}"], stdin=secret
            )
            for name, command in zip(names, commands)
        ]

    def _names(self) -> list[str]:
        if self.hostfile is None:
            raise ConfigError("backend ssh needs --hostfile, a file with one host per line.")
        try:
            lines = self.hostfile.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"hostfile {str(self.hostfile)!r} cannot be read: {error}") from error
        names = [name for line in lines if (name := line.partition("#")[0].strip())]
        if not names:
            raise ConfigError(f"hostfile {str(self.hostfile)!r} lists no host.")
        hosts = [name.rpartition("@")[2] for name in names]
        for name, host in zip(names, hosts):
            if len(name.split()) > 1 or name.startswith("-"):
                raise ConfigError(
                    f"hostfile {str(self.hostfile)!r} has the line {name!r}; give one host per "
                    "line, as name or user@name."
                )
            if hosts.count(host) > 1:
                raise ConfigError(
                    f"hostfile {str(self.hostfile)!r} lists {host!r} {hosts.count(host)} times; "
                    "each host runs one process."
                )
        return names
