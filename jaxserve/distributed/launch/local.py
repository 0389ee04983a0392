"""Local backend: several hosts on this machine."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path

from jaxserve.core.errors import ConfigError
from jaxserve.distributed.launch.job import HERE, Job, require, secret_line
from jaxserve.distributed.launch.processes import HostProcess, run_together

_LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Local:
    """Processes on this machine, which share its devices evenly."""

    def dry_run(self, job: Job) -> str:
        return "".join(f"{host}\n" for host in self._hosts(job))

    def run(self, job: Job) -> int:
        hosts = self._hosts(job)
        require(job.python or HERE, "local")
        return run_together(hosts, job.shutdown_timeout)

    def _hosts(self, job: Job) -> list[HostProcess]:
        job.refuse("local", "accelerator")
        count = job.required_hosts()
        devices = _divided_gpus(job, count)
        coordinator = f"{_LOOPBACK}:{_free_port(job.port)}"
        secret = secret_line()
        return [
            HostProcess(
                job.host_command(HERE, coordinator=coordinator, host=host, stdin_line=True),
                {} if devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(devices[host])},
                secret,
            )
            for host in range(count)
        ]


def _divided_gpus(job: Job, hosts: int) -> list[list[str]] | None:
    """Each host's GPUs, or None if hosts compute on the CPU.

    Raises ConfigError if there are too few.
    """
    gpus = visible_gpus()
    if not gpus:
        return None
    each = job.devices_per_host or len(gpus) // hosts
    if each == 0 or each * hosts > len(gpus):
        asked = f"{hosts} hosts of {max(each, 1)}"
        raise ConfigError(
            f"this machine has {len(gpus)} GPUs, but {asked} need {hosts * max(each, 1)}. "
            "Launch fewer, or set JAX_PLATFORMS=cpu to use the CPU."
        )
    return [gpus[host * each : (host + 1) * each] for host in range(hosts)]


def visible_gpus() -> list[str]:
    """NVIDIA GPUs that JAX would use in this environment, as named in CUDA_VISIBLE_DEVICES.

    Detected without JAX, which would allocate memory on each.
    """
    platforms = os.environ.get("JAX_PLATFORMS")
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return []
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [gpu for gpu in chosen.split(",") if gpu]
    found = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return sorted(found, key=int)


def _free_port(port: int | None) -> int:
    """`port`, or any free port if None. Raises ConfigError if it is in use."""
    try:
        with socket.create_server((_LOOPBACK, port or 0)) as server:
            return server.getsockname()[1]
    except OSError as error:
        raise ConfigError(
            f"port {port} of {_LOOPBACK} cannot be used: {error.strerror}. Give another --port, or "
            "leave it out to use any free port."
        ) from error
