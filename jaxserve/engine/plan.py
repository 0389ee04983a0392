"""What one step computes, as plain data: the scheduler's answer and the runner's order."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jaxserve.engine.sequence import Sequence
from jaxserve.runtime.buckets import StepShape


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence, computed in one step.

    Positions `start .. start + num_tokens - 1`. A decode is a chunk of one token whose value lies
    on the device, in the row `slot` of the last sampled tokens; a prefill chunk's tokens are known
    to the host. `slot` is a snapshot: by the time the step is read, the sequence may have lost it.
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    """Whether it reaches the sequence's last token, so that the step samples the next one."""
    output_index: int
    """Index among the sequence's output tokens of the token it samples, or will lead to."""
    slot: int

    @property
    def scored(self) -> bool:
        """Whether the log probabilities of its prompt were asked for."""
        return self.seq.params.prompt_logprobs is not None


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: decodes first, then prefill chunks. Pack it before the next call of `schedule`,
    which may take pages back from sequences that this step was the last to need them."""

    decodes: tuple[Chunk, ...] = ()
    prefills: tuple[Chunk, ...] = ()
    preempted: tuple[Sequence, ...] = ()

    @property
    def num_prefill_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.prefills)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + self.num_prefill_tokens

    @property
    def shape(self) -> StepShape:
        """What decides which program the step runs in."""
        shape = StepShape(len(self.decodes))
        for chunk in self.prefills:
            stop = chunk.start + chunk.num_tokens
            shape = shape.plus(stop, chunk.num_tokens, scored=chunk.scored)
        return shape

    @property
    def empty(self) -> bool:
        return not self.decodes and not self.prefills
