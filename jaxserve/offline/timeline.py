"""Token counts over the time of a run, in bounded memory."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable
from typing import NamedTuple

MAX_SAMPLES = 400
RECENT = 30
"""Latest samples, from which the current rate is computed."""
_FIRST_PERIOD_S = 0.25


class Sample(NamedTuple):
    """Tokens computed or found in the cache up to a time since the start of the run."""

    elapsed_s: float
    prompt_tokens: int
    output_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class Timeline:
    """Counts tokens and samples the counts periodically. Above MAX_SAMPLES, every second sample is
    dropped and the period doubles."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begin = clock()
        self._period_s = _FIRST_PERIOD_S
        self._prompt_tokens = 0
        self._output_tokens = 0
        self.samples = [Sample(0.0, 0, 0)]
        self._recent = collections.deque(self.samples, maxlen=RECENT)

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._begin

    @property
    def tokens(self) -> int:
        return self._prompt_tokens + self._output_tokens

    @property
    def tokens_per_s(self) -> float:
        """Rate over the latest samples."""
        earlier, elapsed_s = self._recent[0], self.elapsed_s
        return (self.tokens - earlier.tokens) / max(1e-9, elapsed_s - earlier.elapsed_s)

    def add(self, prompt_tokens: int, output_tokens: int) -> None:
        self._prompt_tokens += prompt_tokens
        self._output_tokens += output_tokens
        if self.elapsed_s - self.samples[-1].elapsed_s >= self._period_s:
            self.sample()

    def sample(self) -> None:
        """Record a sample of the current counts."""
        sample = Sample(self.elapsed_s, self._prompt_tokens, self._output_tokens)
        self.samples.append(sample)
        self._recent.append(sample)
        if len(self.samples) > MAX_SAMPLES:
            self._period_s *= 2
            del self.samples[1::2]


def duration(seconds: float) -> str:
    """Formatted as `3.2 s`, `12:05` or `1:02:03`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
