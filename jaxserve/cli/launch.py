"""`jaxserve launch`: run a command on several hosts as one job."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from tyro.conf import Positional, UseAppendAction, arg

from jaxserve.core.errors import ConfigError
from jaxserve.distributed.launch.job import Backend, Job, is_script
from jaxserve.distributed.launch.k8s import Kubernetes
from jaxserve.distributed.launch.local import Local
from jaxserve.distributed.launch.ray_cluster import RayCluster
from jaxserve.distributed.launch.slurm import Slurm
from jaxserve.distributed.launch.ssh import Ssh
from jaxserve.distributed.launch.tpu_vm import TpuVm


@dataclasses.dataclass(frozen=True)
class JobSettings(Job):
    """What to launch. The command goes last, after `--`."""

    command: Annotated[Positional[tuple[str, ...]], arg(metavar="COMMAND")]


@dataclasses.dataclass(frozen=True)
class Launch:
    """Run a jaxserve command, or a script, on several hosts as one job.

    jaxserve launch --hosts 2 --devices-per-host 4 -- my_script.py

    Attributes:
        backend: how to start the hosts: processes on this machine, or a cluster.
        dry_run: print what would be run or submitted, without doing it.
    """

    job: JobSettings
    backend: Literal["local", "slurm", "k8s", "tpu-vm", "ssh"] = "local"
    dry_run: bool = False
    slurm: UseAppendAction[Slurm] = dataclasses.field(default_factory=Slurm)
    k8s: Kubernetes = dataclasses.field(default_factory=Kubernetes)
    tpu_vm: TpuVm = dataclasses.field(default_factory=TpuVm)
    ssh: Ssh = dataclasses.field(default_factory=Ssh)

    def run(self, parse: Callable[[Sequence[str]], object]) -> int:
        """`parse`: parses the arguments of a jaxserve command."""
        backend = self._chosen()
        if self._check_command(parse):
            backend = self._of_replicas()
        if self.dry_run:
            sys.stdout.write(backend.dry_run(self.job))
            return 0
        return backend.run(self.job)

    def _chosen(self) -> Backend:
        """Raises ConfigError for options of other backends, which would be ignored."""
        backends: dict[str, Backend] = {
            "local": Local(),
            "slurm": self.slurm,
            "k8s": self.k8s,
            "tpu-vm": self.tpu_vm,
            "ssh": self.ssh,
        }
        chosen = backends.pop(self.backend)
        for name, other in backends.items():
            for field in dataclasses.fields(other):
                if getattr(other, field.name) != field.default:
                    option = "--" + field.name.replace("_", "-")
                    raise ConfigError(
                        f"{option} is an option of backend {name}, and the backend is "
                        f"{self.backend}; leave it out, or give --backend {name}."
                    )
        return chosen

    def _of_replicas(self) -> Backend:
        """Several replicas, which Ray starts on the hosts. Raises ConfigError where it cannot."""
        if self.backend != "k8s":
            raise ConfigError(
                "replicas are started by Ray, and not by launch; start a Ray cluster on the hosts, "
                "and the server there without launch, or give --backend k8s."
            )
        if self.k8s.topology is not None:
            raise ConfigError("--topology is of one TPU slice, and not of several replicas.")
        return RayCluster(self.k8s.image, self.k8s.namespace)

    def _check_command(self, parse: Callable[[Sequence[str]], object]) -> bool:
        """Parse a jaxserve command before it is submitted, so that errors show before queueing.
        Returns whether it serves several replicas.

        Raises what parsing it raises, and ConfigError for a mesh that does not use all devices.
        """
        command = dataclasses.replace(self.job, hosts=self.job.hosts or 1).command_on(0)
        if command[0] != "-m" and not is_script(command):
            from jaxserve.cli.serve import Serve

            parsed = parse(command)
            parsed = getattr(parsed, "kind", parsed)
            if isinstance(parsed, Serve) and parsed.num_replicas > 1 and not self.job.independent:
                return True
            self._check_mesh(parsed)
        return False

    def _check_mesh(self, command: object) -> None:
        """Raises ConfigError when the engine's mesh does not use all devices of the job."""
        engine = getattr(command, "engine", None)
        hosts, devices = self.job.hosts or 1, self.job.devices_per_host
        if engine is None or self.job.independent or hosts == 1 or devices is None:
            return
        if engine.num_devices != hosts * devices:
            raise ConfigError(
                f"{hosts} hosts of {devices} devices have {hosts * devices}, but the mesh of the "
                f"command's engine has {engine.num_devices}; give the command "
                f"--tensor-parallel-size {hosts * devices}, or sizes with that product. For one "
                "engine per host: jaxserve launch --independent."
            )
