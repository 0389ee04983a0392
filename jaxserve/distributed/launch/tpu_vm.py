"""Cloud TPU backend: the VMs of a TPU slice, reached with gcloud."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path

from jaxserve.core.errors import ConfigError
from jaxserve.distributed.launch.job import Job, is_script, require, secret_line
from jaxserve.distributed.launch.processes import HostProcess, run_together

_PYTHON = "python3"


@dataclasses.dataclass(frozen=True)
class TpuVm:
    """A Cloud TPU slice, named by --name. Each of its VMs is a host.

    Attributes:
        zone: zone of the TPU; by default gcloud's configured zone.
        project: project of the TPU; by default gcloud's configured project.
        create: create the slice first, of type --accelerator. It is not deleted afterwards.
        spot: create it as a spot (preemptible) slice.
        version: software version for --create: see gcloud compute tpus tpu-vm versions list.
        install: what to pip install on each VM first: a directory or wheel, which is copied there,
            or a requirement.
    """

    zone: str | None = None
    project: str | None = None
    create: bool = False
    spot: bool = False
    version: str | None = None
    install: str | None = None

    def dry_run(self, job: Job) -> str:
        steps, hosts = self._plan(job)
        return "".join(f"{shlex.join(step)}\n" for step in steps) + "".join(
            f"{host}\n" for host in hosts
        )

    def run(self, job: Job) -> int:
        steps, hosts = self._plan(job)
        require("gcloud", "tpu-vm")
        for step in steps:
            status = subprocess.run(step, stdout=sys.stderr).returncode
            if status != 0:
                return status
        return run_together(hosts, job.shutdown_timeout)

    def _plan(self, job: Job) -> tuple[list[list[str]], list[HostProcess]]:
        """The sequential setup steps, and the host processes to run together."""
        hosts = job.required_hosts()
        job.refuse("tpu-vm", "port")
        if not self.create and (job.accelerator or self.version or self.spot):
            raise ConfigError(
                "--accelerator, --version and --spot apply only to a new slice; add --create."
            )
        steps = [self._create(job)] if self.create else []
        if self.install is not None:
            steps += self._install(job, self.install)
        if is_script(job.command):
            script, *arguments = job.command
            steps.append(self._gcloud("scp", script, f"{job.name}:", "--worker=all"))
            job = dataclasses.replace(job, command=(f"./{Path(script).name}", *arguments))
        command = shlex.join(job.host_command(_PYTHON, stdin_line=True))
        secret = secret_line()
        return steps, [
            HostProcess(self._on(job, str(host), f"exec {command}"), stdin=secret)
            for host in range(hosts)
        ]

    def _create(self, job: Job) -> list[str]:
        if job.accelerator is None or self.version is None:
            raise ConfigError(
                "--create needs --accelerator, the slice type such as v6e-16, and --version, its "
                "software version."
            )
        kind = [f"--accelerator-type={job.accelerator}", f"--version={self.version}"]
        return self._gcloud("create", job.name, *kind, *(["--spot"] if self.spot else []))

    def _install(self, job: Job, source: str) -> list[list[str]]:
        steps = []
        if Path(source).exists():
            name = Path(source).resolve().name
            steps.append(
                self._gcloud("scp", "--recurse", source, f"{job.name}:{name}", "--worker=all")
            )
            source = f"./{name}[tpu]"
        python = shlex.quote(job.python or _PYTHON)
        install = f"{python} -m pip install {shlex.quote(source)}"
        return [*steps, self._on(job, "all", install)]

    def _on(self, job: Job, worker: str, command: str) -> list[str]:
        return self._gcloud("ssh", job.name, f"--worker={worker}", f"--command={command}")

    def _gcloud(self, verb: str, *arguments: str) -> list[str]:
        where = [f"--{key}={value}" for key in ("zone", "project") if (value := getattr(self, key))]
        return ["gcloud", "compute", "tpus", "tpu-vm", verb, *arguments, *where]
