"""What an engine's devices hold across steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxserve.models.family import Params
from jaxserve.sampling import SamplingState
from jaxserve.sampling.speculation import SpeculationState
from pallas_kernels.paged_attention import KVPages


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class DeviceState:
    """Everything that stays on the devices, as arrays or as their shapes.

    kv: pages of a stage, concatenated over stages: an array for each layer of a KV group.
    tables: page tables of all slots, int32 [slots + 1, max_pages] for each stage and KV group.
    last_tokens: the newest token of every slot, int32 [slots + 1].
    sampling: per-slot state of sampling parameters.
    no_masks: for each size of a sampling step, the masks of one without a grammar.
    speculation: lengths, tokens and drafts of sequences; None without speculation.
    carry: activations between pipeline stages, of decodes and of prefill tokens; None without
        stages.

    The last slot of each is for padding. Programs donate what they replace, so these fields are the
    only references to it.
    """

    params: Params
    kv: list[KVPages]
    tables: jax.Array
    last_tokens: jax.Array
    sampling: SamplingState
    no_masks: dict[int, jax.Array]
    speculation: SpeculationState | None
    carry: tuple[jax.Array, jax.Array] | None

    @property
    def outside_layers(self) -> Params:
        """The parameters outside the layers: embeddings, final norm, head."""
        return {name: value for name, value in self.params.items() if name != "layers"}


def allocate(shapes: DeviceState, params: Params) -> DeviceState:
    """A state of these shapes with `params`, all else zero, when it is on the devices."""
    state = jax.tree.map(lambda shape: filled(shape, 0), dataclasses.replace(shapes, params={}))
    return dataclasses.replace(jax.block_until_ready(state), params=params)


def filled(array: jax.ShapeDtypeStruct, value: float) -> jax.Array:
    """A constant array with the given sharding, filled on the host: filling by XLA would compile a
    program for every shape."""

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        sizes: Any = (part.indices(size) for part, size in zip(index, array.shape))
        return np.full([stop - start for start, stop, _ in sizes], value, array.dtype)

    return jax.make_array_from_callback(array.shape, array.sharding, shard)
