"""Parts of JAX without a public name; no other module of jaxserve imports `jax._src`.

- The key-value store of JAX's coordination service: `jax.distributed` only starts it, and
  `multihost_utils` exchanges values by collectives, which would wait behind the steps.
- The cluster that `jax.distributed.initialize` detects, to check its hosts before JAX connects
  them: a host that is missing or duplicated ends JAX's process.
- Whether JAX has opened its devices, after which settings of their memory have no effect.

tests/runtime/test_jax_private.py checks each under the version of JAX that is installed.
"""

from __future__ import annotations

from typing import Any

from jax._src import clusters, distributed, xla_bridge


def coordination_client() -> Any:
    """The client of the coordination service that `jax.distributed.initialize` started."""
    return distributed.global_state.client


def detect_cluster(timeout_s: int) -> tuple[str, int, int] | None:
    """The coordinator, the number of hosts and this host's index, if JAX finds itself in a cluster:
    under Slurm, Open MPI, Kubernetes and on Cloud TPUs. Raises RuntimeError or ValueError for an
    environment that it cannot read."""
    coordinator, num_hosts, host, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, timeout_s
    )
    if coordinator is None or num_hosts is None or host is None:
        return None
    return coordinator, num_hosts, host


def devices_are_open() -> bool:
    """Whether JAX has opened the devices of any platform."""
    return xla_bridge.backends_are_initialized()
