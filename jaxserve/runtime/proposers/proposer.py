"""What a method of speculative decoding provides."""

from __future__ import annotations

import abc
from typing import Any

import jax

from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.runtime.programs.device_state import DeviceState
from jaxserve.runtime.programs.device_step import PackedInputs
from jaxserve.runtime.programs.forward.forward_programs import Hidden
from jaxserve.runtime.programs.page_programs import SetTables
from jaxserve.runtime.programs.program_kind import ProgramKind
from jaxserve.runtime.programs.shapes.program import ProgramShapes
from jaxserve.sampling.speculation import Acceptance


class Proposer(abc.ABC):
    """Makes the drafts of a step on the device, just before the step verifies them.

    By the exact rule of acceptance drafts decide how many steps an answer takes and none of its
    tokens. What a method remembers is in the device state: the tokens of every sequence
    (`speculation`), and the pages of its layers, which share their numbers with the target's
    (`kv`), so that whatever moves or shares a page within the engine carries them too.
    """

    kinds: tuple[ProgramKind[Any], ...]
    """Its programs, compiled with all others."""

    @abc.abstractmethod
    def __init__(self, shapes: ProgramShapes, set_tables: SetTables) -> None: ...

    @abc.abstractmethod
    def propose(self, state: DeviceState, step: PackedInputs) -> None:
        """Writes drafts for the decodes of `step` to `state.speculation`, at least as many as it
        verifies, NO_DRAFT where there is none. Called before every step, also those that verify
        nothing; the host does not wait."""

    def verified(
        self,
        state: DeviceState,
        step: PackedInputs,
        width: int,
        token_ids: jax.Array,
        acceptance: Acceptance,
    ) -> None:
        """Takes what a step sampled, `width` tokens for each of `step.sampled`, int32 [at least as
        many], and how many of them are accepted, as `state.speculation` has them already."""
        return

    def extend(
        self,
        state: DeviceState,
        step: PackedInputs,
        key: ProgramKey,
        hidden: Hidden,
    ) -> None:
        """Takes what a step computed by the program `key`, after its tokens are in `state`. Most
        methods need nothing of it."""
        return
