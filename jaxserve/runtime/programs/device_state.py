"""What an engine's devices hold across steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxserve.models.family import Params
from jaxserve.models.lora import Adapters
from jaxserve.runtime.weights.source import ResidentWeights, WeightSource
from jaxserve.sampling import SamplingState
from jaxserve.sampling.speculation import SpeculationState
from pallas_kernels.paged_attention import Pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class DeviceState:
    """Everything that stays on the devices, as arrays or as their shapes.

    weights: the parameters of the model, or where they are; of shapes always resident.
    kv: pages of a stage, concatenated over stages: an array for each layer of a KV group, then one
        for each layer of a draft model.
    tables: page tables of all slots, int32 [slots + 1, max_pages] for each stage and KV group.
    last_tokens: the newest token of every slot, int32 [slots + 1].
    sampling: per-slot state of sampling parameters.
    no_masks: for each size of a sampling step, the masks of one without a grammar.
    speculation: lengths, tokens and drafts of sequences; None without speculation.
    draft_params: parameters of a draft model; None without one.
    lora: adapters of each layer's parameters (models/lora.py); None without adapters.
    carry: activations between pipeline stages, of decodes and of prefill tokens; None without
        stages.

    The last slot of each is for padding. Programs donate what they replace, so these fields are the
    only references to it.
    """

    weights: WeightSource
    kv: list[Pages]
    tables: jax.Array
    last_tokens: jax.Array
    sampling: SamplingState
    no_masks: dict[int, jax.Array]
    speculation: SpeculationState | None
    draft_params: Params | None
    lora: list[dict[str, Adapters]] | None
    carry: tuple[jax.Array, jax.Array] | None

    @property
    def params(self) -> Params:
        """All parameters, of weights that are resident."""
        assert isinstance(self.weights, ResidentWeights)
        return self.weights.params

    @property
    def adapted_params(self) -> Params:
        """As `params`, each layer's with its adapters as "lora"."""
        layers = self._adapted(slice(None), self.params["layers"])
        return self.params | {"layers": layers}

    @property
    def outside_layers(self) -> Params:
        """The parameters outside the layers: embeddings, final norm, head."""
        return self.weights.outside_layers

    def take_layers(self, layers: slice, x: jax.Array) -> list[Params]:
        """As WeightSource.take, each layer's parameters with its adapters as "lora"."""
        return self._adapted(layers, self.weights.take(layers, x))

    def _adapted(self, layers: slice, params: list[Params]) -> list[Params]:
        if self.lora is None:
            return params
        return [p | {"lora": own} for p, own in zip(params, self.lora[layers])]


def allocate(
    shapes: DeviceState, weights: WeightSource, draft_params: Params | None
) -> DeviceState:
    """A state of these shapes with the parameters, all else zero, when it is on the devices."""
    rest = dataclasses.replace(shapes, weights=ResidentWeights({}), draft_params=None)
    state = jax.block_until_ready(jax.tree.map(lambda shape: filled(shape, 0), rest))
    return dataclasses.replace(state, weights=weights, draft_params=draft_params)


def filled(array: jax.ShapeDtypeStruct, value: float) -> jax.Array:
    """A constant array with the given sharding, filled on the host: filling by XLA would compile a
    program for every shape."""

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        sizes: Any = (part.indices(size) for part, size in zip(index, array.shape))
        return np.full([stop - start for start, stop, _ in sizes], value, array.dtype)

    return jax.make_array_from_callback(array.shape, array.sharding, shard)


def put(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """An array of the host on the devices, each host's part on its own."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
