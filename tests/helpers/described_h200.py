"""A mesh of one H200 that is only described, to trace programs for."""

from __future__ import annotations

import jax
from jax._src.mesh import AbstractDevice


def described_h200(kind: str = "NVIDIA H200") -> jax.sharding.AbstractMesh:
    """With another name it is that GPU."""
    device = AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    return jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
