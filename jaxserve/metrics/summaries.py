"""Latency summaries: of a live sequence, of a finished one, and of a whole run.

Times are on the event log's clock; None means "not yet", or "never" once the sequence has ended.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxserve.core.events import VerifiedDrafts
from jaxserve.core.requests.outputs import RequestMetrics
from jaxserve.metrics.fluidity import Deadlines, Fluidity, fluidity
from jaxserve.metrics.statistics import percentile


class DraftCounts(NamedTuple):
    """Drafts verified, one for each sequence and step that had any, their tokens, and those
    accepted."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def after(self, drafted: VerifiedDrafts) -> DraftCounts:
        """With the drafts of a sequence in one more step."""
        return self.plus(DraftCounts(1, drafted.num_tokens, drafted.num_accepted))

    def plus(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(*map(operator.add, self, other))


NO_DRAFTS = DraftCounts()


class SequenceSummary(NamedTuple):
    """Summary of a sequence that ended; `token_us` is empty unless `keep_tokens`."""

    request_id: str
    arrival_us: int
    admitted_us: int | None
    first_token_us: int | None
    last_token_us: int | None
    finish_us: int
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    fluidity: Fluidity
    token_us: tuple[int, ...]
    drafts: DraftCounts = NO_DRAFTS

    @property
    def queue_us(self) -> int | None:
        return None if self.admitted_us is None else self.admitted_us - self.arrival_us

    @property
    def ttft_us(self) -> int | None:
        return None if self.first_token_us is None else self.first_token_us - self.arrival_us

    @property
    def e2e_us(self) -> int:
        return self.finish_us - self.arrival_us

    @property
    def inter_token_us(self) -> tuple[int, ...]:
        """`output_tokens - 1` times between tokens; 0 for tokens of the same step."""
        return tuple(b - a for a, b in zip(self.token_us, self.token_us[1:]))


@dataclass(slots=True)
class LiveSequence:
    """A sequence that has not ended, with the time of every token it has received, but for those of
    a streak (`Metrics`)."""

    request_id: str
    arrival_us: int
    prompt_tokens: int
    running: bool = False
    admitted_us: int | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    drafts: DraftCounts = NO_DRAFTS
    token_us: list[int] = field(default_factory=list)
    streak_start: int = 0
    """Of the step times that `Metrics` holds, the first that is not in `token_us` yet."""

    @property
    def queue_us(self) -> int | None:
        return None if self.admitted_us is None else self.admitted_us - self.arrival_us

    @property
    def first_token_us(self) -> int | None:
        return self.token_us[0] if self.token_us else None

    @property
    def finish_us(self) -> None:
        return None

    def summarize(
        self, finish_us: int, finish_reason: str, deadlines: Deadlines, keep_tokens: bool
    ) -> SequenceSummary:
        prefill_us = deadlines.prefill_us(self.prompt_tokens)
        return SequenceSummary(
            request_id=self.request_id,
            arrival_us=self.arrival_us,
            admitted_us=self.admitted_us,
            first_token_us=self.first_token_us,
            last_token_us=self.token_us[-1] if self.token_us else None,
            finish_us=finish_us,
            finish_reason=finish_reason,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=len(self.token_us),
            preemptions=self.preemptions,
            fluidity=fluidity(self.arrival_us, self.token_us, prefill_us, deadlines.decode_us),
            token_us=tuple(self.token_us) if keep_tokens else (),
            drafts=self.drafts,
        )


def request_metrics(sequences: Collection[LiveSequence | SequenceSummary]) -> RequestMetrics:
    """The times of a request: of its first sequence to be served and its last to end.

    `cached_tokens` is the minimum over its sequences: the others may have reused the prompt of the
    first.
    """
    firsts = [s.first_token_us for s in sequences if s.first_token_us is not None]
    queues = [s.queue_us for s in sequences if s.queue_us is not None]
    finishes = [s.finish_us for s in sequences if s.finish_us is not None]
    return RequestMetrics(
        arrival_us=min(s.arrival_us for s in sequences),
        first_token_us=min(firsts, default=None),
        finish_us=max(finishes) if len(finishes) == len(sequences) else None,
        queue_us=min(queues, default=None),
        cached_tokens=min(s.cached_tokens for s in sequences),
        **_drafts_of(sequences)._asdict(),
    )


def _drafts_of(sequences: Iterable[LiveSequence | SequenceSummary]) -> DraftCounts:
    return functools.reduce(DraftCounts.plus, (s.drafts for s in sequences), NO_DRAFTS)


class Percentiles(NamedTuple):
    """Nearest-rank percentiles of whole microseconds."""

    p50: int
    p90: int
    p99: int


@dataclass(frozen=True)
class RunSummary:
    """Summary of a run, over the sequences that received tokens.

    `elapsed_us` runs from the first arrival to the last token; `output_tokens_per_s` is over that
    time. `stream_tokens_per_s` is the rate of one stream after its first token, averaged over the
    tokens of all streams; None if none had a second token.
    """

    sequences: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    elapsed_us: int
    output_tokens_per_s: float
    stream_tokens_per_s: float | None
    ttft_us: Percentiles
    fluidity: Fluidity
    drafts: DraftCounts = NO_DRAFTS

    @classmethod
    def of(cls, sequences: Iterable[SequenceSummary]) -> RunSummary | None:
        """None if no sequence received a token."""
        served = [s for s in sequences if s.output_tokens]
        if not served:
            return None
        ttfts = [s.ttft_us for s in served]
        output_tokens = sum(s.output_tokens for s in served)
        elapsed_us = max(s.last_token_us for s in served) - min(s.arrival_us for s in served)
        streaming_us = sum(s.last_token_us - s.first_token_us for s in served)
        return cls(
            sequences=len(served),
            prompt_tokens=sum(s.prompt_tokens for s in served),
            cached_tokens=sum(s.cached_tokens for s in served),
            output_tokens=output_tokens,
            elapsed_us=elapsed_us,
            output_tokens_per_s=output_tokens * 1e6 / max(1, elapsed_us),
            stream_tokens_per_s=(
                (output_tokens - len(served)) * 1e6 / streaming_us if streaming_us else None
            ),
            ttft_us=Percentiles(*(percentile(ttfts, p) for p in (50, 90, 99))),
            fluidity=Fluidity(
                met=sum(s.fluidity.met for s in served),
                missed=sum(s.fluidity.missed for s in served),
            ),
            drafts=_drafts_of(served),
        )
