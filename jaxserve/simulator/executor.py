"""An executor that computes nothing: steps take the time that `StepTimes` gives them, and that of
what they read from below the device."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from jaxserve.core.sequence import Sequence
from jaxserve.core.steps.buckets import Buckets, ProgramKey
from jaxserve.core.steps.pipeline import Pipeline
from jaxserve.core.steps.plan import ScheduledChunk, StepPlan
from jaxserve.core.steps.results import DispatchedStep, PackedStep, StepResults
from jaxserve.kv.layout import staged_pages
from jaxserve.simulator.acceptance import AcceptanceModel
from jaxserve.simulator.layer_reads import LayerReads
from jaxserve.simulator.step_times import StepTimes
from jaxserve.structured.matcher import TokenMatcher

_BUBBLE = PackedStep(-1, StepPlan(), ProgramKey(0, 0))


class VirtualClock:
    """The time of a simulation, in microseconds from 0 on. It moves only when told.

    Attributes:
        watchers: called with the time before and the time after, when it moves.
    """

    def __init__(self) -> None:
        self.watchers: list[Callable[[int, int], None]] = []
        self._now_us = 0

    def now(self) -> int:
        return self._now_us

    def advance_to(self, time_us: int) -> None:
        """Moves the clock to `time_us`, if that is later."""
        if time_us <= self._now_us:
            return
        for watcher in self.watchers:
            watcher(self._now_us, time_us)
        self._now_us = time_us


@dataclasses.dataclass(frozen=True)
class SimulatedStep(DispatchedStep):
    """A dispatched step whose results are ready at `ready_us`."""

    ready_us: int


class SimulatedExecutor:
    """Runs step plans on a virtual clock, in dispatch order, one dispatch after another.

    The host takes no time: the clock moves on when the results of a step are read.
    """

    def __init__(
        self,
        buckets: Buckets,
        num_stages: int,
        times: StepTimes,
        clock: VirtualClock,
        token_of: Callable[[Sequence, int], int],
        acceptance: AcceptanceModel | None = None,
        reads: LayerReads | None = None,
    ) -> None:
        """`token_of` gives the token that a sequence samples at a position of its output;
        `acceptance` says which drafts are accepted, and is needed where there are any; `reads`:
        what steps read from below the device, if they do."""
        self.in_flight: collections.deque[SimulatedStep] = collections.deque()
        self.num_dispatches = 0
        self._times = times
        self._clock = clock
        self._token_of = token_of
        self._acceptance = acceptance
        self._num_output: dict[int, int] = {}
        """Tokens that the devices have sampled for each sequence with drafts."""
        self._pipeline = Pipeline(buckets, num_stages, _BUBBLE)
        self._reads = reads
        self._block: list[PackedStep] = []
        """Steps that wait for others to share reads with."""
        self._free_us = 0

    @property
    def steps_ahead(self) -> int:
        """As Executor. A dispatch that reads from below the device ends with its step."""
        return 1 if self._reads is None else 0

    @property
    def busy(self) -> bool:
        """Whether a dispatched step is still in the pipeline, or waits for those that share its
        reads."""
        return bool(self._block) or self._pipeline.busy

    def register(
        self,
        seq: Sequence,
        seed: int,
        bad_word_ids: SequenceOf[SequenceOf[int]],
        eos_token_ids: tuple[int, ...],
        matcher: TokenMatcher | None,
    ) -> None:
        """Does nothing: `token_of` alone decides what a sequence samples."""

    def forget(self, seq: Sequence) -> None:
        """Drops what is known of a sequence, once no dispatched step decodes it any more."""
        steps = (*self.in_flight, *self._block, *self._pipeline.steps)
        if not any(chunk.seq is seq for step in steps for chunk in step.plan.decodes):
            self._num_output.pop(seq.seq_id, None)

    def pack(self, plan: StepPlan, step_id: int) -> PackedStep:
        """Raises ProgramMissError when no program holds the plan."""
        return PackedStep(step_id, plan, self._pipeline.key(plan))

    def dispatch(self, packed: PackedStep, begun_us: int | None) -> None:
        """Enters a step into the pipeline; the oldest one there completes. Steps that share reads
        wait until there are enough of them."""
        self.num_dispatches += 1
        if self._reads is not None:
            if packed is not _BUBBLE:
                self._block.append(packed)
            if packed is _BUBBLE or len(self._block) == self._reads.steps:
                self._run_block(begun_us)
            return
        self._pipeline.enter(packed)
        key, together = self._pipeline.key(), self._pipeline.plans
        self._occupy(self._times.step(key, together))
        if (oldest := self._pipeline.leave()) is not None:
            self._complete(oldest, key, together, begun_us)

    def _run_block(self, begun_us: int | None) -> None:
        """Passes steps through the layers together: all of them end with the last."""
        steps, self._block = self._block, []
        compute_s = sum(self._times.step(step.key, (step.plan,)) for step in steps)
        self._occupy(self._reads.pass_s(compute_s, [step.plan for step in steps]))
        for step in steps:
            together = (step.plan,) if len(steps) == 1 else ()
            self._complete(step, step.key, together, begun_us)

    def _complete(
        self,
        step: PackedStep,
        key: ProgramKey,
        together: tuple[StepPlan, ...],
        begun_us: int | None,
    ) -> None:
        """A step has been computed once the devices are free."""
        self.in_flight.append(
            SimulatedStep(
                step.step_id,
                self.num_dispatches,
                begun_us,
                step.plan,
                key,
                together,
                self._free_us,
            )
        )

    def advance(self, begun_us: int | None = None) -> None:
        """Moves the pipeline on by one stage, with no step entering, or runs those that wait for
        others to share reads with."""
        self.dispatch(_BUBBLE, begun_us)

    def read(self, step: SimulatedStep) -> StepResults:
        """Moves the clock to the end of a step."""
        self._clock.advance_to(step.ready_us)
        sampled = step.plan.sampled
        if self._acceptance is not None:
            return self._verified(step, sampled)
        tokens = [[self._token_of(chunk.seq, chunk.output_index)] for chunk in sampled]
        return StepResults(sampled, tokens, num_drafts=[0] * len(sampled), width=1)

    def _verified(self, step: SimulatedStep, sampled: tuple[ScheduledChunk, ...]) -> StepResults:
        """The results of a step that may verify drafts. Like a device, it knows how many were
        accepted in steps that the host had not read when it planned this one."""
        num_decodes, tokens, num_drafts = len(step.plan.decodes), [], []
        for place, chunk in enumerate(sampled):
            seq, first, found, accepted = chunk.seq, chunk.output_index, 0, 0
            if place < num_decodes:
                first = self._num_output.get(seq.seq_id, first)
                if chunk.num_drafts:
                    found, accepted = self._acceptance.verified(seq, first, chunk.num_drafts)
            tokens.append([self._token_of(seq, first + index) for index in range(accepted + 1)])
            num_drafts.append(found)
            self._num_output[seq.seq_id] = first + accepted + 1
            if seq.finished:
                self.forget(seq)
        return StepResults(sampled, tokens, num_drafts, step.key.width)

    def gather(self, pages: SequenceOf[int]) -> int:
        """Stands for a staging array: the number of its pages."""
        self._copy(staged_pages(len(pages)))
        return len(pages)

    def to_host(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        """Copies pages of sequences longer than the pool, given as (device, host): those of a step
        that waits for others are on the link before these run."""
        self._occupy(self._reads.to_host_s(len(pairs)))

    def scatter(self, pages: SequenceOf[int], staging: object) -> None:
        self._copy(staged_pages(len(pages)))

    def copy(self, pairs: SequenceOf[tuple[int, int]]) -> None:
        self._copy(len(pairs))

    def poison(self, pages: SequenceOf[int]) -> None:
        """Takes no time: pages have no content."""
        self._drain()

    def _copy(self, num_pages: int) -> None:
        self._drain()
        self._occupy(self._times.copy(num_pages))

    def _drain(self) -> None:
        """Completes every step: page operations apply to all stages at once."""
        while self.busy:
            self.advance()

    def _occupy(self, seconds: float) -> None:
        """Occupies the devices, from the end of what they do now on."""
        self._free_us = max(self._free_us, self._clock.now()) + round(seconds * 1e6)
