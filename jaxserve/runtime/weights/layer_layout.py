"""A layer's parameters as one run of bytes, and back."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import numpy as np

from jaxserve.models.family import Params
from jaxserve.models.loading.assemble import CPU_ALIGNMENT_BYTES, Index, by_slice

_Bounds = tuple[tuple[int, int], ...]


class _Leaf(NamedTuple):
    """A parameter, the shape of a shard of it, and where each shard lies."""

    array: jax.ShapeDtypeStruct
    shard_shape: tuple[int, ...]
    offsets: dict[_Bounds, int]

    def shard(self, buffer: np.ndarray, index: Index) -> np.ndarray:
        """The shard with this index, as a view of the buffer."""
        offset = self.offsets[_bounds(index, self.array.shape)]
        num_bytes = math.prod(self.shard_shape) * self.array.dtype.itemsize
        view = buffer[offset : offset + num_bytes].view(self.array.dtype)
        return view.reshape(self.shard_shape)


class LayerLayout:
    """Where a layer's parameters lie in `num_bytes` bytes: each shard that the devices of this
    process hold once, at a multiple of the alignment that CPUs use without a copy. `content` tells
    apart what lies where, on whatever devices."""

    def __init__(self, params: Params) -> None:
        """`params` are the shapes of a layer's parameters, with their shardings."""
        leaves, self._structure = jax.tree.flatten(params)
        self._leaves: list[_Leaf] = []
        self.num_bytes = 0
        for array in leaves:
            shape = array.sharding.shard_shape(array.shape)
            num_bytes = math.prod(shape) * array.dtype.itemsize
            offsets: dict[_Bounds, int] = {}
            for index in array.sharding.addressable_devices_indices_map(array.shape).values():
                bounds = _bounds(index, array.shape)
                if bounds not in offsets:
                    offsets[bounds] = self.num_bytes
                    self.num_bytes += num_bytes + -num_bytes % CPU_ALIGNMENT_BYTES
            self._leaves.append(_Leaf(array, shape, offsets))
        self.content = repr(
            [(leaf.array.shape, str(leaf.array.dtype), leaf.offsets) for leaf in self._leaves]
        )

    def pack(self, params: Params, buffer: np.ndarray) -> None:
        """Write a layer's arrays to a buffer of bytes."""
        for leaf, array in zip(self._leaves, self._structure.flatten_up_to(params), strict=True):
            for shard in array.addressable_shards:
                if shard.replica_id == 0:
                    leaf.shard(buffer, shard.index)[...] = np.asarray(shard.data)

    def unpack(self, buffer: np.ndarray) -> Params:
        """A layer's arrays on their devices, ready. On CPUs they are views of the buffer."""
        arrays = [
            by_slice(leaf.array.shape, leaf.array.sharding, functools.partial(leaf.shard, buffer))
            for leaf in self._leaves
        ]
        return jax.block_until_ready(self._structure.unflatten(arrays))


def _bounds(index: Index, shape: tuple[int, ...]) -> _Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
