"""Divides a step's prefill token budget among sequences."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal

from jaxserve.core.sequence import Sequence
from jaxserve.scheduler.config import SchedulerConfig
from jaxserve.scheduler.slack import RelativeSlack
from jaxserve.scheduler.step_time import StepLoad, StepTime


class TokenBudget:
    """Assigns prefill chunks to sequences in turn, by a policy's chunk rule (`policies.py`)."""

    def __init__(
        self,
        rule: Literal["whole", "budget", "exact"],
        room: int,
        min_chunk_tokens: int,
        max_chunks: int,
    ) -> None:
        """`room` tokens in total, of at most `max_chunks` sequences. A chunk has
        `min_chunk_tokens`, or is the last of its prompt."""
        self.taken: list[tuple[Sequence, int]] = []
        self._rule = rule
        self._room = room
        self._min_chunk_tokens = min_chunk_tokens
        self._max_chunks = max_chunks

    @property
    def full(self) -> bool:
        return not self._room or len(self.taken) >= self._max_chunks

    def take(self, seq: Sequence, left: int) -> bool:
        """Gives a sequence with `left` tokens to prefill its share; False if it gets none."""
        if len(self.taken) >= self._max_chunks:
            return False
        if self._rule == "exact" and self.taken:
            self._take_back(min(left, self._min_chunk_tokens) - self._room)
        share = self._share(left)
        if share:
            self.taken.append((seq, share))
            self._room -= share
        return bool(share)

    def _share(self, left: int) -> int:
        room = self._room
        if left <= room or not self.taken or self._rule == "exact":
            return min(left, room)
        if self._rule == "whole" or room < self._min_chunk_tokens:
            return 0
        return room

    def _take_back(self, wanted: int) -> None:
        """Shortens the last share by up to `wanted` tokens, not below the floor."""
        seq, share = self.taken[-1]
        taken = max(0, min(wanted, share - self._min_chunk_tokens))
        self.taken[-1] = seq, share - taken
        self._room += taken


class TimedTokenBudget:
    """Assigns prefill chunks to sequences in turn while the predicted step time is within a target
    (adaptive chunks and batch packing of Medha, Agrawal et al. 2024).

    A chunk is the whole rest of a prompt, or fills a program to its last token: the largest of
    these that meets the target. So in an otherwise equal step, chunks never grow as the context
    does. If not even the smallest meets it, the first sequence still gets that one, or it might
    never run.

    A step has at most one long prefill. It yields some of the remaining time to the sequences
    behind it, and takes what they leave in the end.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        step_time: StepTime,
        slack: RelativeSlack,
        load: StepLoad,
        room: int,
        running: Iterable[Sequence],
    ) -> None:
        """`room` prefill tokens, in addition to `load`, the decodes of the step; `running` are
        prefills in progress, in any order."""
        self.taken: list[tuple[Sequence, int]] = []
        self._config = config
        self._step_time = step_time
        self._slack = slack
        self._load = load
        self._room = room
        self._running = deque(sorted(running, key=slack.urgency))
        self._long: tuple[int, int] | None = None  # Index of the long prefill, its tokens left.

    @property
    def full(self) -> bool:
        return self._load.prefill_tokens == self._room

    def passes_over(self, seq: Sequence) -> bool:
        """Whether a sequence is long and the step already has a long prefill."""
        return self._long is not None and self._slack.is_long(seq)

    def take(self, seq: Sequence, left: int) -> bool:
        """Gives a sequence with `left` tokens to prefill its share; False if it gets none."""
        floor, limit_us = self._config.min_chunk_tokens, self._config.target_step_us
        is_long = self._slack.is_long(seq)
        if is_long:
            spare_us = limit_us - (self._step_time.predict(self._load) or 0)
            limit_us -= round(max(0, spare_us) * self._slack.yielded(seq))
        share = self._share(seq, left, limit_us, floor)
        if not share and not self.taken:
            share = min(left, self._room, max(floor, self._config.buckets.prefill_tokens[0]))
        if not share:
            return False
        if is_long:
            self._long = len(self.taken), left - share
        self.taken.append((seq, share))
        self._load = self._with(seq, left, share)
        return True

    def give_running(self, before: Sequence | None = None) -> None:
        """Assigns chunks to prefills in progress that are more urgent than `before`, or to all."""
        urgency, running = self._slack.urgency, self._running
        while running and (before is None or urgency(running[0]) < urgency(before)):
            seq = running.popleft()
            if not self.full and not self.passes_over(seq):
                self.take(seq, seq.remaining)

    def finish(self) -> None:
        """Extends the chunk of the long prefill by what the others left."""
        if self._long is not None:
            index, left = self._long
            seq, share = self.taken[index]
            more = self._share(seq, left, self._config.target_step_us, 1, extends=True)
            self.taken[index] = seq, share + more

    def _with(self, seq: Sequence, left: int, share: int, *, extends: bool = False) -> StepLoad:
        """The load of the step with this chunk added."""
        start = seq.num_tokens - left
        return self._load.plus(start, share, scored=seq.scored, extends=extends)

    def _share(
        self, seq: Sequence, left: int, limit_us: int, least: int, *, extends: bool = False
    ) -> int:
        """The largest chunk of a sequence's remaining tokens that meets the time limit, or 0."""
        used = self._load.prefill_tokens
        most = min(left, self._room - used)
        fills = (size - used for size in reversed(self._config.buckets.prefill_tokens))
        for share in (most, *(fill for fill in fills if fill < most)):
            if share <= 0 or share < min(least, left):
                break
            predicted_us = self._step_time.predict(self._with(seq, left, share, extends=extends))
            if predicted_us is not None and predicted_us <= limit_us:
                return share
        return 0
