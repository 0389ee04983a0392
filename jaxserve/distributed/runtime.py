"""Joining the other hosts: one call, before anything else is asked of JAX."""

from __future__ import annotations

import jax

import jaxserve
from jaxserve.distributed import roll_call
from jaxserve.errors import DistributedError
from jaxserve.runtime.cpu_threads import make_room_for_collectives

# How long a host may be silent before JAX takes it for dead and ends the others.
_HEARTBEAT_TIMEOUT_S = 30


def join(
    coordinator: str | None = None,
    num_hosts: int | None = None,
    host: int | None = None,
    *,
    devices: int | None = None,
    timeout_s: int = 300,
) -> None:
    """Make this process one host of a job, so that `jax.devices()` are those of all hosts.

    Without `coordinator`, `num_hosts` and `host` JAX finds them: under Slurm, Open MPI, Kubernetes
    and on Cloud TPUs. A host is a process; several may share a machine. SIGTERM ends the process
    as usual, which JAX's preemption service would prevent, so it is not used.

    Args:
        coordinator: where the others reach host 0, as `name:port`.
        num_hosts: hosts of the job.
        host: this one's number, from 0.
        devices: how many devices this host has. CPUs are given that many virtual ones; of GPUs
            that JAX finds under Slurm, which by default are one for each host, the first so many.
        timeout_s: how long all hosts together may take to come.

    Raises:
        DistributedError: the hosts do not come together, and why: a coordinator out of reach, a
            port that is taken, a host that is missing, there twice, or of another version.
    """
    if jax.distributed.is_initialized():
        raise DistributedError(
            "this process has joined the other hosts already; it can do so once. Under `jaxserve "
            "launch` a script need not join."
        )
    if (coordinator, num_hosts, host) == (None, None, None):
        set_cpu_devices(devices)
        local_devices = None if devices is None else range(devices)
        _initialize(local_device_ids=local_devices, initialization_timeout=timeout_s)
        return
    if coordinator is None or num_hosts is None or host is None:
        raise DistributedError(
            f"coordinator is {coordinator!r}, num_hosts {num_hosts} and host {host}; give all "
            "three, or none where JAX finds them."
        )
    if not 0 <= host < num_hosts:
        raise DistributedError(
            f"host is {host} and num_hosts {num_hosts}; hosts are numbered from 0 to num_hosts - 1."
        )
    address = roll_call.Address.parse(coordinator)
    set_cpu_devices(devices)
    versions = {"version of jaxserve": jaxserve.__version__, "version of JAX": jax.__version__}
    me = roll_call.Attendee(host, num_hosts, versions)
    (roll_call.call if host == 0 else roll_call.answer)(address, me, timeout_s)
    _initialize(
        coordinator_address=str(address),
        num_processes=num_hosts,
        process_id=host,
        # Or else JAX would still look around for what it may add.
        cluster_detection_method="deactivate",
        initialization_timeout=timeout_s,
        coordinator_bind_address=address.bind,
    )


def set_cpu_devices(devices: int | None) -> None:
    """Have CPUs be so many virtual devices. Raises DistributedError when they are used already."""
    if devices is None:
        return
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError as error:
        raise _too_late() from error
    make_room_for_collectives()


def _initialize(**settings: object) -> None:
    # SIGTERM is to end the process, and this service's handler would only note it.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S, **settings)
    except RuntimeError as error:
        if "before any JAX calls" in str(error):
            raise _too_late() from error
        raise DistributedError(f"JAX's distributed runtime did not start: {error}") from error
    except ValueError as error:
        raise DistributedError(
            f"JAX found no job to join here ({error}): this is no task of Slurm or Open MPI, no "
            "Kubernetes pod and no Cloud TPU. Give coordinator, num_hosts and host."
        ) from error


def _too_late() -> DistributedError:
    return DistributedError(
        "JAX has devices already; join the other hosts before the first array or jax.devices()."
    )
