"""The kind of programs that write a LoRA adapter to its slot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax import lax

from jaxserve.models.lora import SLOTS
from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.program_kind import PartKind, partition_specs


def set_adapter(dimensions: tuple[int, ...], adapters: Any, own: Any, index: jax.Array) -> Any:
    """The `adapters` of a layer with those at `index` (int32 scalar) replaced by `own`, one
    adapter. `dimensions` of slots are in the order of their leaves."""
    leaves, structure = jax.tree.flatten(adapters)
    written = [
        lax.dynamic_update_slice_in_dim(whole, part, index, dimension)
        for whole, part, dimension in zip(leaves, jax.tree.leaves(own), dimensions, strict=True)
    ]
    return structure.unflatten(written)


class SetAdapter(PartKind[int]):
    """Writes one layer of an adapter; the layers with adapters of the same shapes share a program,
    named by the first of them."""

    title = "set-adapter"
    pure = set_adapter
    donated = (0,)

    def keys(self) -> Iterable[int]:
        return dict.fromkeys(self._firsts)

    @property
    def _firsts(self) -> list[int]:
        """For each layer, the first one with the same shapes."""
        layers = self.shapes.adapters.abstract or []
        return [layers.index(layer) for layer in layers]

    def static(self, key: int) -> tuple[Any, ...]:
        specs = jax.tree.leaves(self.shapes.lora[key])
        return (tuple(spec.axes.index(SLOTS) for spec in specs),)

    def uploads(self, key: int) -> tuple[Any, ...]:
        return self.shapes.adapter.abstract[key], self.shapes.int32()

    def of_state(self, key: int) -> tuple[Any, ...]:
        return (self.shapes.adapters.abstract[key],)

    def output_specs(self, key: int) -> Any:
        return partition_specs(*self.of_state(key))

    def __call__(self, state: DeviceState, slot: int, adapter: Iterable[Any]) -> None:
        """Puts the layers of an adapter, arrays on the devices, into a slot from 1 on."""
        index = np.int32(slot - 1)
        for layer, (first, own) in enumerate(zip(self._firsts, adapter, strict=True)):
            state.lora[layer] = self.call(first, state.lora[layer], own, index)
