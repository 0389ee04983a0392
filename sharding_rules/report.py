"""Placement of arrays on a mesh, with bytes per device. It needs no devices."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.tree_util import SequenceKey, keystr, tree_flatten_with_path
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sharding_rules.rules import KV, MEGATRON, Rules, named_sharding


@dataclasses.dataclass(frozen=True)
class NamedArray:
    """Shape, dtype and dimension names of an array (None: unnamed)."""

    shape: tuple[int, ...]
    dtype: jax.typing.DTypeLike
    names: tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class PlacedArrays:
    """Arrays of equal shape and names, such as those of a model's layers, and their sharding."""

    name: str
    """Path in the tree, with `*` for an index."""
    count: int
    array: NamedArray
    sharding: NamedSharding

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """Shape of each array's shard."""
        return self.sharding.shard_shape(self.array.shape)

    @property
    def bytes_per_device(self) -> int:
        """Of all `count` arrays."""
        return self.count * _num_bytes(self.shard_shape, self.array.dtype)

    @property
    def global_bytes(self) -> int:
        """Of all `count` arrays, each counted once."""
        return self.count * _num_bytes(self.array.shape, self.array.dtype)

    @property
    def split(self) -> str:
        """Dimensions and the mesh axes that split them, as text; axes of one device are omitted."""
        degrees = self.sharding.mesh.shape
        parts = []
        for name, axes in zip(self.array.names, self.sharding.spec, strict=True):
            axes = axes if isinstance(axes, tuple) else (axes,)
            axes = [axis for axis in axes if axis is not None and degrees[axis] > 1]
            if axes:
                parts.append(f"{name} over {' x '.join(axes)}")
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Placement of arrays on a mesh. `str` of it is the table."""

    mesh: Mesh | AbstractMesh
    arrays: tuple[PlacedArrays, ...]

    @functools.cached_property
    def bytes_per_device(self) -> int:
        """The same on every device: all splits are even."""
        return sum(arrays.bytes_per_device for arrays in self.arrays)

    @functools.cached_property
    def global_bytes(self) -> int:
        """Each array counted once, however many devices hold it."""
        return sum(arrays.global_bytes for arrays in self.arrays)

    def __str__(self) -> str:
        table = Table(box=None, pad_edge=False)
        for heading in ("ARRAY", "COUNT", "DTYPE", "SHAPE", "SPLIT", "SHARD", "BYTES PER DEVICE"):
            right = heading in ("COUNT", "BYTES PER DEVICE")
            table.add_column(heading, justify="right" if right else "left", no_wrap=True)
        for placed in self.arrays:
            cells = (
                placed.name,
                str(placed.count),
                jnp.dtype(placed.array.dtype).name,
                " ".join(map(_dimension, placed.array.names, placed.array.shape)),
                placed.split or "-",
                " ".join(map(str, placed.shard_shape)),
                f"{placed.bytes_per_device:,}",
            )
            table.add_row(*map(Text, cells))
        lines = "".join(segment.text for segment in Console(width=1_000_000).render(table))
        degrees = " x ".join(f"{axis} {n}" for axis, n in self.mesh.shape.items())
        return (
            f"{lines}each of {math.prod(self.mesh.shape.values())} devices ({degrees}): "
            f"{self.bytes_per_device:,} bytes; every array once: {self.global_bytes:,} bytes"
        )


def placement(tree: Any, mesh: Mesh | AbstractMesh, rules: Rules = MEGATRON | KV) -> Placement:
    """Placement by `rules` of the arrays of `tree`, whose leaves are `NamedArray`s.

    Arrays that differ only by their index in a list (or tuple) are grouped. Raises ValueError as
    `named_sharding` does, with the name of the array.
    """
    counts: dict[tuple[str, NamedArray], int] = {}
    for path, array in tree_flatten_with_path(tree)[0]:
        name = ".".join(
            "*" if isinstance(key, SequenceKey) else keystr((key,), simple=True) for key in path
        )
        counts[name, array] = counts.get((name, array), 0) + 1
    placed = []
    for (name, array), count in counts.items():
        try:
            sharding = named_sharding(mesh, array.names, array.shape, rules)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        placed.append(PlacedArrays(name, count, array, sharding))
    return Placement(mesh, tuple(placed))


def _num_bytes(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def _dimension(name: str | None, size: int) -> str:
    return str(size) if name is None else f"{name}={size}"
