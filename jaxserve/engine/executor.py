"""What the engine core runs on: an executor of steps, an observer of them, a loader of adapters."""

from __future__ import annotations

import collections
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Protocol

from jaxserve.core.requests.lora import LoadedAdapter, LoRARequest
from jaxserve.core.sequence import Sequence
from jaxserve.core.steps.plan import StepPlan
from jaxserve.core.steps.results import DispatchedStep, PackedStep, StepResults
from jaxserve.structured.matcher import TokenMatcher

if TYPE_CHECKING:
    from jaxserve.runtime.adapters import StagedAdapter


class Executor(Protocol):
    """Runs step plans: on devices (`runtime.runner.Runner`), or on a virtual clock
    (`simulator.executor.SimulatedExecutor`)."""

    in_flight: collections.deque[DispatchedStep]
    """Steps completed by a dispatch and not yet read, oldest first."""
    num_dispatches: int

    @property
    def steps_ahead(self) -> int:
        """Dispatches between the one that completes a step and the reading of that step: 1, or 0
        where a dispatch ends no sooner than its step."""

    @property
    def busy(self) -> bool:
        """Whether the pipeline holds a step that needs more dispatches to complete."""

    def register(
        self,
        seq: Sequence,
        seed: int,
        bad_word_ids: SequenceOf[SequenceOf[int]],
        eos_token_ids: tuple[int, ...],
        matcher: TokenMatcher | None,
    ) -> None:
        """Registers a sequence before its first step. Raises RequestError for bad `bad_words`."""

    def forget(self, seq: Sequence) -> None: ...

    def pack(self, plan: StepPlan, step_id: int) -> PackedStep:
        """Builds a plan's inputs. Raises ProgramMissError when no compiled program fits it."""

    def dispatch(self, packed: PackedStep, begun_us: int) -> None:
        """Starts a step asynchronously."""

    def advance(self, begun_us: int) -> None:
        """Advances the pipeline by one stage with a bubble at its entry."""

    def read(self, step: DispatchedStep) -> StepResults:
        """Waits for a step's results."""


class StepObserver(Protocol):
    """What is done about each step beside running it: by `MeasuredTimes`, or to keep several hosts
    in lockstep by `ReplicatedCore`."""

    def dispatched(self, plan: StepPlan) -> None:
        """Called after a step was dispatched."""

    def read(self, step: DispatchedStep, results: StepResults, us: int) -> None:
        """Called after a step was read, which took `us`."""


class AdapterLoader(Protocol):
    """The LoRA adapters of an engine (`runtime.adapters.AdapterSlots`)."""

    def load(
        self, wanted: LoRARequest | StagedAdapter, *, in_place: bool, pinned: bool
    ) -> LoadedAdapter: ...

    def remove(self, name: str) -> None: ...
