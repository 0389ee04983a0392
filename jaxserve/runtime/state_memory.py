"""The memory of a runner's state: parameters and pages, freed and taken again between steps."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np

from jaxserve.models.family import Params
from jaxserve.runtime.program_kinds import ProgramKinds
from jaxserve.runtime.programs.device_state import DeviceState, filled
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from jaxserve.runtime.weights.source import ResidentWeights


class StateMemory:
    """Frees and replaces arrays of `state` in place. No step may be in flight."""

    def __init__(self, state: DeviceState, shapes: ProgramShapes, kinds: ProgramKinds) -> None:
        self._state, self._shapes = state, shapes
        self._host_kv = kinds.host_kv
        if self._host_kv is not None:
            self._host_kv.allocate()  # Fail now, not in a step.

    def replace_params(self, arrays: Iterator[jax.Array]) -> None:
        """Put these in the place of the parameters, in the order of their leaves. A parameter is
        freed before the next array is asked for: together they never take more memory."""
        old, structure = jax.tree.flatten(self._state.params)
        new = []
        for param in old:
            if isinstance(param, jax.Array):
                param.delete()
            new.append(jax.block_until_ready(next(arrays)))
        self._state.weights = ResidentWeights(structure.unflatten(new))
        self._restore_draft()

    def offload_params(self, *, keep: bool) -> None:
        """Free the parameters on the devices; `keep` copies them to host memory first, as those of
        a draft model always are. Without it a copy there is dropped too."""

        def offload(array: jax.Array | np.ndarray) -> np.ndarray:
            host = np.asarray(array)
            if isinstance(array, jax.Array):
                array.delete()
            return host

        state = self._state
        state.draft_params = jax.tree.map(offload, state.draft_params)
        if keep:
            state.weights = ResidentWeights(jax.tree.map(offload, state.params))
        else:
            for array in jax.tree.leaves(state.params):
                if isinstance(array, jax.Array):
                    array.delete()
            state.weights = ResidentWeights(self._shapes.params.abstract)

    def restore_params(self) -> None:
        """Put the parameters in host memory back on the devices."""
        params = _placed(self._state.params, self._shapes.params.abstract)
        self._state.weights = ResidentWeights(params)
        self._restore_draft()

    def _restore_draft(self) -> None:
        shapes = self._shapes.draft_params.abstract
        self._state.draft_params = _placed(self._state.draft_params, shapes)

    def free_pages(self) -> None:
        """Free the KV pool."""
        for array in jax.tree.leaves(self._state.kv):
            array.delete()
        self._state.kv = []
        if self._host_kv is not None:
            self._host_kv.free()

    def allocate_pages(self) -> None:
        """Allocate the KV pool again, empty."""
        self._state.kv = jax.tree.map(lambda shape: filled(shape, 0), self._shapes.kv.abstract)
        if self._host_kv is not None:
            self._host_kv.allocate()


def _placed(params: Params | None, shapes: Params | None) -> Params | None:
    """Parameters in host memory, on the devices; those that are there stay."""
    placed = jax.tree.map(
        lambda array, shape: jax.device_put(array, shape.sharding), params, shapes
    )
    return jax.block_until_ready(placed)
