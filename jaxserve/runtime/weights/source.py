"""Where the parameters of a model are: all on the devices, or some of them elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import jax

from jaxserve.core.steps.counters import WeightReads
from jaxserve.models.family import Params
from jaxserve.runtime.hardware.arrays import tree_bytes


class WeightSource(Protocol):
    """The owner of a model's parameters, which programs get from it.

    A step takes the parameters of each layer once, in order, and calls `end_step` after the last.
    """

    @property
    def outside_layers(self) -> Params:
        """Embeddings, final norm and head, which are always on the devices."""

    @property
    def reads(self) -> WeightReads | None:
        """What it has read for steps; None where nothing ever is."""

    @property
    def device_bytes(self) -> int:
        """Bytes of one device that the parameters take now."""

    def take(self, layers: slice, x: jax.Array) -> list[Params]:
        """The parameters of consecutive layers, on the devices. `x` is what these layers get: once
        it is ready, all layers before them are done. Raises WeightsError when a read failed."""

    def end_step(self, x: jax.Array) -> None:
        """Note that `x` is the result of the last layer."""

    def close(self) -> None:
        """End what runs beside the steps. Can be called twice."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ResidentWeights:
    """All parameters are on the devices. `params` are arrays, or their shapes."""

    params: Params

    @property
    def outside_layers(self) -> Params:
        return {name: value for name, value in self.params.items() if name != "layers"}

    @property
    def reads(self) -> None:
        return None

    @property
    def device_bytes(self) -> int:
        return tree_bytes(self.params)

    def take(self, layers: slice, x: jax.Array) -> list[Params]:
        return self.params["layers"][layers]

    def end_step(self, x: jax.Array) -> None:
        """Nothing has to be read."""

    def close(self) -> None:
        """Nothing runs beside the steps."""
