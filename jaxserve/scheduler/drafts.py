"""How many tokens to draft, chosen for every step by goodput (SmartSpec, Liu et al. 2024).

Goodput is tokens accepted per second. If the first draft of a sequence's step is accepted with
probability a, and one after an accepted draft with probability b, then k drafts yield
1 + a (1 - b^k) / (1 - b) tokens on average. They differ: where text repeats itself at all, it goes
on to (one probability for both would say that three drafts are about as good as seven). The step's
time is predicted from those measured, for each number of drafts. All are learned as the engine
runs, so lengths that are not in use are explored now and then. There is no clock and nothing
random: the same tokens and step times give the same lengths, on every host of a job.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf

from jaxserve.core.sequence import Sequence
from jaxserve.core.steps.buckets import ProgramKey
from jaxserve.scheduler.step_time import StepLoad, StepTime

START_ACCEPTANCE = 0.7
"""Acceptance that is assumed before any draft was verified."""

PRIOR = 8
"""Drafts that what is assumed at first counts for: of a sequence, what all others accept; of
drafts after accepted ones, what first ones are."""

HORIZON = 96
"""Forgetting horizon in tokens of a sequence: a draft this many tokens ago weighs 1/e of the
latest. So the rare drafts of exploration count for more."""

HORIZON_OF_ALL = 64
"""The same, in observations of all sequences together, one for each and step: what new ones are
assumed to accept."""

MIN_ACCEPTANCE = 0.1
"""A sequence that accepts fewer first drafts is not drafted for, except in exploration."""

EXPLORATION_STEPS = 16
"""Steps from one exploration to the next at least, of sequences and of other lengths."""

REMEASURE_STEPS = 16 * EXPLORATION_STEPS
"""Steps after which the time of a length that is not in use is measured again."""

EXPLORATION_SHARE = 0.01
"""Share of the goodput that exploration of other lengths may cost."""

PREFERENCE = 1.03
"""How much better another length must be than the one in use."""

COST_OF_DRAFT = 0.1
"""What a draft adds to a step without one, until it is measured: little, so that it is tried."""


class FixedDraftLength:
    """As many drafts for every sequence as it may have."""

    def choose(self, decodes: SequenceOf[Sequence], expected: Callable[[], int]) -> None:
        """Called before a step of these sequences is planned, which may have as many tokens of
        prompts as `expected` says."""

    def of(self, seq: Sequence) -> int:
        """Drafts of a sequence in that step."""
        return seq.num_speculative_tokens

    def observe(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Records that a step accepted `num_accepted` of `num_drafts` drafts, 1 or more: those up
        to the first that was wrong, or missing."""


class AdaptiveDraftLength(FixedDraftLength):
    """Chooses one of `lengths`, ascending from 0, for all sequences of a step that take drafts."""

    def __init__(self, lengths: SequenceOf[int], step_time: StepTime) -> None:
        self._lengths = lengths
        self._step_time = step_time
        self._of_all = _Mean(), _Mean()
        self._best = lengths[-1]
        self._length = 0
        self._num_steps = 0
        self._saved = 1.0
        """What exploration may cost, in steps of the chosen length."""
        self._last_used: dict[ProgramKey, int] = {}
        """The step that last ran a program."""

    def choose(self, decodes: SequenceOf[Sequence], expected: Callable[[], int]) -> None:
        seqs = [seq for seq in decodes if seq.num_speculative_tokens]
        if not seqs:
            return
        prefill_tokens = expected()
        self._num_steps += 1
        alone = StepLoad(len(decodes), sum(seq.num_computed + 1 for seq in decodes))
        times = self._times_us(self._loads(alone))
        chances = [self._acceptance(seq) for seq in seqs]
        tokens = {length: len(decodes) + _accepted(chances, length) for length in self._lengths}
        goodput = {length: tokens[length] / times[length] for length in self._lengths}
        usual, self._best = self._best, max(goodput, key=goodput.__getitem__)
        if goodput[self._best] <= PREFERENCE * goodput[usual]:
            self._best = usual
        self._length, load = self._best, alone
        if prefill_tokens:
            # Such a step has to be made anyway, and its program has rows for all sequences: drafts
            # pay there if they take less time than their tokens would take in steps of decodes.
            load = alone._replace(prefill_tokens=prefill_tokens)
            times = self._times_us(self._loads(load))
        gain = {
            length: tokens[length] / goodput[self._best] - times[length] for length in self._lengths
        }
        if prefill_tokens:
            self._length = max(gain, key=gain.__getitem__) if self._step_time.observed(load) else 0
        self._saved = min(self._saved + EXPLORATION_SHARE, 1.0)
        for other in self._others(load) if self._explores else ():
            cost = (gain[self._length] - gain[other]) / times[self._length]
            if cost <= self._saved:
                self._saved -= max(cost, 0.0)
                self._length = other
                break
        self._last_used[self._program(load, self._length)] = self._num_steps

    def _loads(self, load: StepLoad) -> dict[int, StepLoad]:
        """`load` with decodes of each length."""
        return {length: load._replace(width=1 + length) for length in self._lengths}

    def _program(self, load: StepLoad, length: int) -> ProgramKey:
        return self._step_time.program(load._replace(width=1 + length))

    def of(self, seq: Sequence) -> int:
        accepts = self._acceptance(seq)[0] >= MIN_ACCEPTANCE
        if not seq.num_speculative_tokens or not (accepts or self._explores):
            return 0
        return self._length

    @property
    def _explores(self) -> bool:
        """Whether the step explores."""
        return self._num_steps % EXPLORATION_STEPS == 0

    def observe(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        tried = 1, min(num_accepted, num_drafts - 1)
        right = min(num_accepted, 1), max(num_accepted - 1, 0)
        num_tokens = len(seq.output_token_ids)
        age = (num_tokens - seq.observed_at) / HORIZON
        first, later = map(
            functools.partial(_moved, age), self._acceptance(seq), right, tried, seq.num_tried
        )
        seq.acceptance = first, later
        seq.num_tried = seq.num_tried[0] + tried[0], seq.num_tried[1] + tried[1]
        seq.observed_at = num_tokens
        for mean, *counts in zip(self._of_all, right, tried):
            mean.add(*counts)

    def _acceptance(self, seq: Sequence) -> tuple[float, float]:
        """The probabilities that a first draft of `seq` is right, and one after a right draft:
        those of all sequences, as far as it has none of its own."""
        first = self._of_all[0].assuming(START_ACCEPTANCE)
        later = self._of_all[1].assuming(first)
        if seq.acceptance is None:
            return first, later
        return seq.acceptance[0], seq.acceptance[1] if seq.num_tried[1] else later

    def _times_us(self, loads: dict[int, StepLoad]) -> dict[int, float]:
        """The time of a step with each length: predicted where it was measured, of any number of
        rows; for the next one guessed by those; infinite for those after it, so that lengths are
        tried one after another. With prefill all are predicted: programs of decodes are no guide
        to those."""
        widths = {program.width for program in self._last_used}
        known = {
            length: self._step_time.predict(load) or 1.0
            for length, load in loads.items()
            if load.prefill_tokens or self._step_time.observed(load) or load.width in widths
        } or {0: 1.0}

        least, most = min(known), max(known)
        of_draft = COST_OF_DRAFT * known[most]
        if least < most:
            of_draft = max(0.0, known[most] - known[least]) / (most - least)
        beyond = [length for length in loads if length > most]
        times = dict.fromkeys(loads, known[least]) | dict.fromkeys(beyond, math.inf)
        if beyond:
            times[beyond[0]] = known[most] + of_draft * (beyond[0] - most)
        return times | known

    def _others(self, load: StepLoad) -> Iterator[int]:
        """Lengths to explore: one whose time is unknown or old, and a few drafts if none are
        chosen."""
        last = {
            length: self._last_used.get(self._program(load, length), 0)
            for length in self._lengths
            if length != self._length
        }
        oldest = min(last, key=last.__getitem__)
        known = self._step_time.observed(load._replace(width=1 + oldest))
        if not known or self._num_steps - last[oldest] > REMEASURE_STEPS:
            yield oldest
        if not self._length:
            yield self._lengths[1]


def _accepted(chances: SequenceOf[tuple[float, float]], length: int) -> float:
    """Drafts that are expected to be accepted of so many for each sequence, by its chances."""
    return sum(
        first * (length if later == 1 else (1 - later**length) / (1 - later))
        for first, later in chances
    )


def _moved(age: float, mean: float, right: int, tried: int, num_tried: int) -> float:
    """A mean with the share of `tried` drafts that were right, after `num_tried` others: at first
    the mean of all, the first value among them; later an exponential one, `age` horizons on."""
    if not tried:
        return mean
    weight = max(1 - math.exp(-age), tried / (PRIOR + num_tried + tried))
    return mean + (right / tried - mean) * weight


@dataclasses.dataclass
class _Mean:
    """The share of drafts that were right, of all sequences together; older ones count less."""

    tried: float = 0.0
    right: float = 0.0

    def add(self, right: int, tried: int) -> None:
        """Adds those of one sequence's step."""
        kept = math.exp(-1 / HORIZON_OF_ALL)
        self.tried, self.right = kept * self.tried + tried, kept * self.right + right

    def assuming(self, share: float) -> float:
        """The share, where this one is assumed before there are any."""
        return (PRIOR * share + self.right) / (PRIOR + self.tried)
