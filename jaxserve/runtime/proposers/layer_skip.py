"""The target's own first layers draft, with its head (self-speculation)."""

from __future__ import annotations

import dataclasses

from jaxserve.core.errors import ConfigError
from jaxserve.models.partition import local
from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.device_step import PackedInputs
from jaxserve.runtime.programs.page_programs import SetTables
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from jaxserve.runtime.proposers.drafter import Draft, Drafter
from jaxserve.runtime.proposers.proposer import Proposer

_NUM_RECENT = 1


class LayerSkipProposer(Proposer):
    """A drafter without parameters or pages of its own: the keys and values of its layers are the
    target's, which verification has written, and writes again where it drafts."""

    def __init__(self, shapes: ProgramShapes, set_tables: SetTables) -> None:
        """Raises ConfigError when the model has fewer layers."""
        model, count = shapes.model, shapes.config.speculative_config.num_layers
        if count > model.num_layers:
            raise ConfigError(
                f"num_layers of speculative_config is {count}, but the model has "
                f"{model.num_layers} layers; set it to at most that."
            )
        first = dataclasses.replace(
            model,
            num_layers=count,
            sliding_windows=model.sliding_windows[:count],
            rope_layers=model.rope_layers[:count],
        )
        config = local(first, tensor=shapes.tensor, stages=1)
        places = shapes.kv_layout.places[:count]
        drafter = Drafter(shapes.family, config, places, _NUM_RECENT)
        self._draft = Draft(shapes, drafter, set_tables)
        self.kinds = (self._draft,)

    def propose(self, state: DeviceState, step: PackedInputs) -> None:
        if step.plan.width > 1:
            self._draft(state, step)
