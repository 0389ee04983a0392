"""Steps on their way through the stages of a pipeline, in a runner or simulated."""

from __future__ import annotations

import collections
from typing import Generic, TypeVar

from jaxserve.core.steps.buckets import Buckets, ProgramKey
from jaxserve.core.steps.plan import StepPlan
from jaxserve.core.steps.results import PackedStep

_Step = TypeVar("_Step", bound=PackedStep)


class Pipeline(Generic[_Step]):
    """Each dispatch has a step, or a bubble, enter the first stage; all others advance by one, and
    the oldest completes. With one stage that is the step itself."""

    def __init__(self, buckets: Buckets, num_stages: int, bubble: _Step) -> None:
        """`bubble`: a step of no rows, for a stage that has none."""
        self._buckets, self._bubble = buckets, bubble
        self._steps = collections.deque([bubble] * (num_stages - 1))

    @property
    def busy(self) -> bool:
        """Whether any stage has a step."""
        return any(step is not self._bubble for step in self._steps)

    @property
    def steps(self) -> tuple[_Step, ...]:
        """Those of all stages, the oldest first, bubbles included."""
        return tuple(self._steps)

    @property
    def plans(self) -> tuple[StepPlan, ...]:
        """Those of `steps`."""
        return tuple(step.plan for step in self._steps)

    def key(self, *entering: StepPlan) -> ProgramKey:
        """The program that holds all steps, and those `entering`. Raises ProgramMissError when
        there is none."""
        return self._buckets.program(plan.shape for plan in (*entering, *self.plans))

    def enter(self, step: _Step) -> None:
        """A step, or the bubble, enters the first stage."""
        self._steps.append(step)

    def leave(self) -> _Step | None:
        """The oldest step, once its last stage is dispatched; None if that was a bubble."""
        oldest = self._steps.popleft()
        return None if oldest is self._bubble else oldest
