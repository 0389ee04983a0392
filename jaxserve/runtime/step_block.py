"""Steps that pass through the layers together, so that they share the reads of streamed weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxserve.core.errors import WeightsError
from jaxserve.runtime.hardware.arrays import tree_bytes
from jaxserve.runtime.program_kinds import ProgramKinds
from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.device_step import PackedInputs
from jaxserve.runtime.programs.forward.forward_programs import Entered, Forward, Hidden, block_bytes
from jaxserve.runtime.programs.shapes.program import ProgramShapes

Pairs = Sequence[tuple[int, int]]


class StepBlock:
    """The block schedule of FlexGen (2303.06865): each layer computes every step of the block
    before the next layer is read.

    A step enters only when the block runs, after those before it: it may have their slots. Within a
    layer they run in order, so a prompt may continue in the next step, and pages change hands, as
    where each step runs by itself.
    """

    def __init__(self, shapes: ProgramShapes, kinds: ProgramKinds) -> None:
        self._shapes, self._kinds = shapes, kinds
        self._steps: list[tuple[PackedInputs, Pairs]] = []
        self._to_host: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """The number of steps that wait for others."""
        return len(self._steps)

    @property
    def full(self) -> bool:
        return len(self._steps) == self._shapes.config.steps_per_weight_read

    def add(self, packed: PackedInputs) -> None:
        self._steps.append((packed, self.take_transfers()))

    def add_transfers(self, pairs: Pairs) -> None:
        """Copies pages, given as (device, host), layer by layer, as the next step gets there."""
        self._to_host += pairs

    def take_transfers(self) -> Pairs:
        """The transfers that belong to no step yet."""
        transfers, self._to_host = self._to_host, []
        return transfers

    def run(
        self, state: DeviceState, propose: Callable[[PackedInputs], None]
    ) -> list[tuple[PackedInputs, Hidden]]:
        """Runs all steps; `propose` is called before each enters."""
        steps, self._steps = self._steps, []
        forward = self._kinds.forward
        assert not isinstance(forward, Forward)  # Streamed layers are no single program.
        entered: list[Entered] = []
        for packed, transfers in steps:
            propose(packed)
            self._kinds.set_tables(state, [packed.frozen])
            step = forward.enter(state, packed.key, [packed.frozen])
            entered.append(step._replace(to_host=transfers))
        self._check_capacity(state, entered)
        hidden = forward.finish(state, entered)
        self._check_capacity(state, hidden)
        return [(packed, of_step) for (packed, _), of_step in zip(steps, hidden)]

    def _check_capacity(self, state: DeviceState, block: Any) -> None:
        """In debug mode, raises WeightsError when the device holds more than was planned."""
        if not self._shapes.config.debug_kv:
            return
        shapes = self._shapes
        arrays = [array for array in jax.tree.leaves(block) if isinstance(array, jax.Array)]
        for name, held, planned in (
            ("weights", state.weights.device_bytes, shapes.placement.device_bytes),
            ("the block", tree_bytes(arrays), block_bytes(shapes)),
            ("pages", tree_bytes(state.kv), tree_bytes(shapes.kv.abstract)),
        ):
            if held > planned:
                raise WeightsError(
                    f"{name} hold {held} bytes of the device, and {planned} were planned; this is "
                    "a bug of jaxserve, please report it."
                )
