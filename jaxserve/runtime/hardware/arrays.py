"""Shapes of arrays with their shardings, and their bytes on one device."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from sharding_rules import Rules, named_sharding


@dataclasses.dataclass(frozen=True)
class ArrayShapes:
    """Shapes of arrays on a `mesh`, which is abstract when only planning, or, without one, on a
    single `device`. Shapes are global; each device holds its shard."""

    device: jax.Device
    mesh: Mesh | AbstractMesh | None = None

    def sharding(self, *spec: str | tuple[str, ...] | None) -> Sharding:
        """Sharding of an array whose dimensions are split over these mesh axes."""
        if self.mesh is None:
            return SingleDeviceSharding(self.device)
        return NamedSharding(self.mesh, P(*spec))

    def by_name(
        self, names: tuple[str | None, ...], shape: tuple[int, ...], rules: Rules
    ) -> Sharding:
        """Sharding of an array whose dimensions have these names."""
        if self.mesh is None:
            return self.sharding()
        return named_sharding(self.mesh, names, shape, rules)

    def int32(self, *shape: int, spec: tuple[str, ...] = ()) -> jax.ShapeDtypeStruct:
        return placed(jax.ShapeDtypeStruct(shape, jnp.int32), self.sharding(*spec))


def placed(array: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.ShapeDtypeStruct:
    """The shape of an array, with its sharding."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def shard_bytes(array: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on one device."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def tree_bytes(tree: Any) -> int:
    """Bytes on one device of the arrays of a tree."""
    return sum(map(shard_bytes, jax.tree.leaves(tree)))
