"""How urgent a prefill is: its slack relative to its work.

LARS of Medha (Agrawal et al. 2024). First come, first served has everyone wait behind one long
prompt; earliest deadline first does once deadlines have passed. Slack relative to total work
shrinks fast for a short prompt and slowly for a long one: who has little to do soon comes first,
who has much comes first when what it has left is due.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxserve.engine.step_time import StepTime

if TYPE_CHECKING:
    from jaxserve.engine.sequence import Sequence

DEADLINE = 4
"""A prefill is due after so many times its predicted time. It takes a step at least."""

LONG_STEPS = 8
"""A prefill that takes more than so many steps of the target is long."""

_MOST_YIELDED = 0.4


class RelativeSlack:
    """`(arrival + deadline - now - time left) / total time` of a sequence, where times are those of
    its prefill, predicted, and the arrival is the time of `Sequence.order`."""

    def __init__(self, step_time: StepTime, target_us: int) -> None:
        self._step_time = step_time
        self._target_us = target_us
        self.now_us = 0

    def urgency(self, seq: Sequence) -> tuple[int, float, tuple[int, int, int]]:
        """Sort key, the most urgent first, within a strict level of priority.

        A sequence that is late by as much as it was given goes by its order: its turn comes,
        however many of its level arrive with less to do.
        """
        return seq.order[0], max(self._slack(seq), -float(DEADLINE)), seq.order

    def is_long(self, seq: Sequence) -> bool:
        return self._total_us(seq) > LONG_STEPS * self._target_us

    def yielded(self, seq: Sequence) -> float:
        """Share of a step's time that a long prefill leaves to others: what its slack allows, and
        at most two fifths."""
        return min(max(self._slack(seq), 0.0), _MOST_YIELDED)

    def _slack(self, seq: Sequence) -> float:
        total_us = self._total_us(seq)
        left_us = self._prefill_us(seq.num_computed, seq.num_tokens)
        due_us = seq.order[1] + DEADLINE * total_us
        return (due_us - self.now_us - left_us) / total_us

    def _total_us(self, seq: Sequence) -> int:
        return max(self._target_us, self._prefill_us(0, seq.num_tokens))

    def _prefill_us(self, start: int, stop: int) -> int:
        """0 as long as nothing is known."""
        return self._step_time.prefill_us(start, stop) or 0
