"""Urgency of a prefill: its slack relative to its work.

LARS of Medha (Agrawal et al. 2024). First come, first served makes all requests wait behind one
long prompt, and so does earliest deadline first once deadlines have passed. Slack relative to total
work shrinks fast for a short prompt and slowly for a long one: a short prompt soon comes first, a
long one when the rest of its work is due.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.scheduler.step_time import StepTime

if TYPE_CHECKING:
    from jaxserve.core.sequence import Sequence

DEADLINE = 4
"""The deadline of a prefill, as a multiple of its predicted time (of at least one step)."""

LONG_STEPS = 8
"""A prefill is long if it takes more than this many steps of the target time."""

_MAX_YIELDED = 0.4


class RelativeSlack:
    """`(arrival + deadline - now - time left) / total time` of a sequence, with predicted prefill
    times; the arrival is the time in `Sequence.order`."""

    def __init__(self, step_time: StepTime, target_us: int) -> None:
        self._step_time = step_time
        self._target_us = target_us
        self.now_us = 0

    def urgency(self, seq: Sequence) -> tuple[int, float, tuple[int, int, int]]:
        """Sort key, most urgent first, within a strict priority level.

        Slack is bounded below by minus `DEADLINE`. A sequence at the bound is sorted by its order,
        so that shorter prompts of its level that arrive later cannot starve it.
        """
        return seq.order[0], max(self._slack(seq), -float(DEADLINE)), seq.order

    def is_long(self, seq: Sequence) -> bool:
        return self._total_us(seq) > LONG_STEPS * self._target_us

    def yielded(self, seq: Sequence) -> float:
        """Share of a step's time that a long prefill yields to others: its slack, at most 2/5."""
        return min(max(self._slack(seq), 0.0), _MAX_YIELDED)

    def _slack(self, seq: Sequence) -> float:
        total_us = self._total_us(seq)
        left_us = self._prefill_us(seq.num_computed, seq.num_tokens)
        due_us = seq.order[1] + DEADLINE * total_us
        return (due_us - self.now_us - left_us) / total_us

    def _total_us(self, seq: Sequence) -> int:
        return max(self._target_us, self._prefill_us(0, seq.num_tokens))

    def _prefill_us(self, start: int, stop: int) -> int:
        """Predicted prefill time; 0 before any step was observed."""
        return self._step_time.prefill_us(start, stop) or 0
