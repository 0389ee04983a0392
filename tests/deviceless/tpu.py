"""What tests need to compile for TPUs.

Needs libtpu of JAX's version (`pip install 'jax[tpu]'`). Where there is no TPU, run with
JAX_PLATFORMS=cpu, or JAX will look for one.
"""

from __future__ import annotations

import functools
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

pytest.importorskip("libtpu", reason="needs libtpu")

# libtpu reads these when it is first used. Without them it asks the machine what kind of TPU it is,
# and allows one process at a time.
for name, value in {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}.items():
    os.environ.setdefault(name, value)

CHIPS = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
"""The smallest topology of each generation that kernels are compiled for."""


@functools.cache
def _devices(topology: str):
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def mesh(topology: str, shape: tuple[int, ...], names: tuple[str, ...]) -> Mesh:
    """The first devices of a topology, as a mesh of that shape."""
    devices = _devices(topology)[: math.prod(shape)]
    return Mesh(np.array(devices).reshape(shape), names)


def sharding(topology: str) -> NamedSharding:
    """On one device of a topology."""
    return NamedSharding(mesh(topology, (1,), ("x",)), PartitionSpec())


def array(on: NamedSharding, *shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """An array with that sharding, described only."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=on)


def compiled(function, *arguments, donate: tuple[int, ...] = ()) -> jax.stages.Compiled:
    """`function` compiled for where its arguments lie, those numbered in `donate` donated."""
    on = jax.tree.leaves(arguments)[0].sharding.mesh
    with jax.sharding.use_abstract_mesh(on.abstract_mesh):
        return jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
