"""Join the other hosts, before JAX is used for anything else."""

from __future__ import annotations

import os

import jax

from jaxserve.core.errors import DistributedError
from jaxserve.core.version import __version__
from jaxserve.distributed import rendezvous
from jaxserve.runtime.hardware.cpu_threads import make_room_for_collectives
from jaxserve.runtime.hardware.jax_private import detect_cluster

# How long a host may miss heartbeats before JAX terminates the other hosts.
_HEARTBEAT_TIMEOUT_S = 30


def join(
    coordinator: str | None = None,
    num_hosts: int | None = None,
    host: int | None = None,
    *,
    devices: int | None = None,
    timeout_s: int = 300,
    secret: str | None = None,
) -> None:
    """Make this process one host of a job, so that `jax.devices()` are those of all hosts.

    Without `coordinator`, `num_hosts` and `host` JAX detects them: under Slurm, Open MPI,
    Kubernetes and on Cloud TPUs. A host is a process; several may share a machine. JAX's preemption
    service is disabled, because it would keep SIGTERM from ending the process.

    Args:
        coordinator: host 0's address, as `name:port`.
        num_hosts: number of hosts of the job.
        host: index of this host, from 0.
        devices: number of devices of this host: virtual devices on CPUs; under Slurm the first
            so many GPUs, where JAX by default uses one per host.
        timeout_s: how long to wait for all hosts to join, in seconds.
        secret: what only the hosts of this job know, the same on each; by default that of the
            environment variable JAXSERVE_JOB_SECRET, which may be absent. Without one, host 0
            takes any process that reaches its port for a host.

    Raises:
        DistributedError: the hosts cannot join: the coordinator is unreachable, its port is in
            use, or a host is missing, duplicated, or has another version or another secret.
    """
    if jax.distributed.is_initialized():
        raise DistributedError(
            "this process has already joined the other hosts; it can join only once. Under "
            "`jaxserve launch` a script need not join."
        )
    secret = os.environ.get(rendezvous.SECRET_VARIABLE, "") if secret is None else secret
    if (coordinator, num_hosts, host) == (None, None, None):
        set_cpu_devices(devices)
        if secret and (detected := _detect(timeout_s)) is not None:
            _meet(*detected, timeout_s, secret)
        local_devices = None if devices is None else range(devices)
        _initialize(local_device_ids=local_devices, initialization_timeout=timeout_s)
        return
    if coordinator is None or num_hosts is None or host is None:
        raise DistributedError(
            f"coordinator is {coordinator!r}, num_hosts {num_hosts} and host {host}; give all "
            "three, or none if JAX can detect them."
        )
    if not 0 <= host < num_hosts:
        raise DistributedError(
            f"host is {host} and num_hosts {num_hosts}; host must be from 0 to num_hosts - 1."
        )
    address = rendezvous.Address.parse(coordinator)
    set_cpu_devices(devices)
    _meet(address, num_hosts, host, timeout_s, secret)
    _initialize(
        coordinator_address=str(address),
        num_processes=num_hosts,
        process_id=host,
        # Otherwise JAX would still run cluster detection.
        cluster_detection_method="deactivate",
        initialization_timeout=timeout_s,
        coordinator_bind_address=address.bind,
    )


def _detect(timeout_s: int) -> tuple[rendezvous.Address, int, int] | None:
    """The coordinator, the number of hosts and this host's index as JAX detects them; None where
    it finds no job. Raises DistributedError."""
    try:
        found = detect_cluster(timeout_s)
    except (RuntimeError, ValueError) as error:
        raise DistributedError(f"JAX cannot read the job's environment: {error}") from error
    if found is None:
        return None
    coordinator, num_hosts, host = found
    return rendezvous.Address.parse(coordinator), num_hosts, host


def _meet(
    address: rendezvous.Address, num_hosts: int, host: int, timeout_s: int, secret: str
) -> None:
    """Check that all hosts are there. Raises DistributedError."""
    versions = {"version of jaxserve": __version__, "version of JAX": jax.__version__}
    me = rendezvous.Participant(host, num_hosts, versions)
    meet = rendezvous.wait_for_hosts if host == 0 else rendezvous.join_host_0
    meet(address, me, timeout_s, secret)


def set_cpu_devices(devices: int | None) -> None:
    """Set the number of virtual CPU devices. Raises DistributedError if JAX is already in use."""
    if devices is None:
        return
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError as error:
        raise _too_late() from error
    make_room_for_collectives()


def _initialize(**settings: object) -> None:
    # SIGTERM must end the process; the handler of this service would only record it.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S, **settings)
    except RuntimeError as error:
        if "before any JAX calls" in str(error):
            raise _too_late() from error
        raise DistributedError(f"JAX's distributed runtime did not start: {error}") from error
    except ValueError as error:
        raise DistributedError(
            f"JAX found no job to join ({error}): this is not a Slurm or Open MPI task, a "
            "Kubernetes pod or a Cloud TPU. Give coordinator, num_hosts and host."
        ) from error


def _too_late() -> DistributedError:
    return DistributedError(
        "JAX is already initialized; join the other hosts before the first array or jax.devices()."
    )
