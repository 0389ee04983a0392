"""Metrics derived from the event log while it is written.

`Metrics.fold` is a sink of `EventLog`. A live sequence has its token times; one that ended
becomes a summary and counts in histograms, and only the latest summaries are stored. Replaying a
log's records into a new `Metrics` gives the same result.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from itertools import repeat

from jaxserve.core.events import (
    Admitted,
    Arrived,
    Collected,
    Dispatched,
    Failed,
    Finished,
    Phase,
    Preempted,
    Record,
    Resumed,
    Transferred,
)
from jaxserve.core.requests.outputs import RequestMetrics
from jaxserve.metrics.fluidity import INTERACTIVE, Deadlines
from jaxserve.metrics.metric import Metric
from jaxserve.metrics.summaries import LiveSequence, SequenceSummary, request_metrics
from jaxserve.metrics.totals import Totals

_MAX_STREAK = 4096
"""Steps whose times are stored in common at most."""


class Metrics:
    """Folds the log's records into counters, histograms and summaries. Safe from any thread."""

    def __init__(
        self,
        deadlines: Deadlines = INTERACTIVE,
        keep_finished: int = 4096,
        keep_tokens: bool = False,
    ):
        """`deadlines` are the token deadlines of the fluidity index.

        The `keep_finished` sequences that ended last stay available as summaries, with their token
        times if `keep_tokens`.
        """
        self._deadlines = deadlines
        self._keep_finished = keep_finished
        self._keep_tokens = keep_tokens
        self._lock = threading.Lock()
        self._folds = {
            Arrived: self._arrived,
            Admitted: self._admitted,
            Preempted: self._preempted,
            Resumed: self._resumed,
            Finished: self._finished,
            Failed: self._failed,
            Dispatched: self._dispatched,
            Collected: self._collected,
            Transferred: self._transferred,
            Phase: self._phase,
        }

        self._totals = Totals()
        self._live: dict[int, LiveSequence] = {}
        self._ended: OrderedDict[int, SequenceSummary] = OrderedDict()
        self._last_sequences: set[int] = set()  # with tokens in the step collected last
        # Nearly every sequence has a token in every step. Those in a streak share the times of the
        # latest steps, and get their part of them when they miss a step, or end.
        self._step_us: list[int] = []
        self._in_streak: set[int] = set()
        self._in_flight: dict[int, int] = {}  # step -> time of its program call [us]

    def fold(self, record: Record) -> None:
        """Processes one record.

        Raises KeyError if it names a sequence that has not arrived or has ended.
        """
        with self._lock:
            self._folds[type(record)](record)

    def request(self, sequences: Iterable[int]) -> RequestMetrics:
        """Metrics so far of the request that consists of these sequences.

        Raises KeyError if one of them is neither live nor among the stored summaries.
        """
        sequences = list(sequences)
        with self._lock:
            self._settle(self._in_streak.intersection(sequences))
            return request_metrics([self._live.get(s) or self._ended[s] for s in sequences])

    def __contains__(self, sequence: int) -> bool:
        """Whether `request` accepts a sequence."""
        with self._lock:
            return sequence in self._live or sequence in self._ended

    def finished(self) -> list[SequenceSummary]:
        """The sequences that ended last, oldest first, at most `keep_finished` of them."""
        with self._lock:
            return list(self._ended.values())

    def get_metrics(self, now_us: int | None = None) -> dict[str, Metric]:
        """All metrics by exported name, at `now_us` on the log's clock (None: the last step)."""
        with self._lock:
            totals, waiting = self._totals, len(self._live) - self._totals.running
            own = totals.own_metrics(now_us or totals.last_ready_us)
            return totals.vllm_metrics(waiting) | own

    # One method per record type.

    def _arrived(self, record: Arrived) -> None:
        self._live[record.sequence] = LiveSequence(
            record.request_id, record.time_us, record.prompt_tokens
        )
        if record.max_tokens is not None:
            self._totals.max_tokens.observe(record.max_tokens)
        if record.index == 0:
            self._totals.n.observe(record.n)

    def _admitted(self, record: Admitted) -> None:
        totals = self._totals
        live = self._live[record.sequence]
        live.running = True
        live.admitted_us = record.time_us
        live.cached_tokens = record.cached_tokens
        totals.running += 1
        totals.prefix_queries += live.prompt_tokens
        totals.prefix_hits += record.cached_tokens

    def _preempted(self, record: Preempted) -> None:
        live = self._live[record.sequence]
        live.running = False
        live.preemptions += 1
        self._totals.running -= 1
        self._totals.preemptions += 1

    def _resumed(self, record: Resumed) -> None:
        self._live[record.sequence].running = True
        self._totals.running += 1

    def _finished(self, record: Finished) -> None:
        totals = self._totals
        summary = self._end(record.sequence, record.time_us, record.reason)
        if record.reason == "abort":
            return  # Latencies are those of completed sequences only.
        totals.e2e.observe(summary.e2e_us)
        self._observe_request(summary)
        totals.fluidity.observe(int(summary.fluidity.index * 100))
        totals.token_deadlines["met"] += summary.fluidity.met
        totals.token_deadlines["missed"] += summary.fluidity.missed

    def _observe_request(self, summary: SequenceSummary) -> None:
        """The histograms with one observation for each completed sequence."""
        totals = self._totals
        totals.request_prompt.observe(summary.prompt_tokens)
        totals.request_computed.observe(summary.prompt_tokens - summary.cached_tokens)
        totals.request_output.observe(summary.output_tokens)
        totals.request_preemptions.observe(summary.preemptions)
        if summary.admitted_us is None or summary.first_token_us is None:
            return  # It was restored with all of its tokens.
        decode_us = summary.last_token_us - summary.first_token_us
        totals.queue.observe(summary.queue_us)
        totals.prefill.observe(summary.first_token_us - summary.admitted_us)
        totals.decode.observe(decode_us)
        totals.inference.observe(summary.last_token_us - summary.admitted_us)
        totals.mean_inter_token.observe(decode_us // max(1, summary.output_tokens - 1))

    def _failed(self, record: Failed) -> None:
        self._end(record.sequence, record.time_us, "error")

    def _end(self, sequence: int, time_us: int, reason: str) -> SequenceSummary:
        if sequence in self._in_streak:
            self._settle([sequence])
            self._in_streak = self._in_streak - {sequence}
        live = self._live.pop(sequence)
        self._totals.running -= live.running
        self._totals.ended_by_reason[reason] += 1
        summary = live.summarize(time_us, reason, self._deadlines, self._keep_tokens)
        self._ended[sequence] = summary
        if len(self._ended) > self._keep_finished:
            self._ended.popitem(last=False)
        return summary

    def _dispatched(self, record: Dispatched) -> None:
        totals = self._totals
        self._in_flight[record.step] = record.packed_us
        if totals.first_call_us is None:
            totals.first_call_us = record.packed_us
        totals.prefill_tokens += record.prefill_tokens
        totals.padded_tokens += record.padded_tokens
        totals.prefix_kv_bytes["once"] += record.prefix_kv_bytes
        totals.prefix_kv_bytes["alone"] += record.prefix_kv_bytes_alone
        totals.host_us["schedule"] += record.schedule_us
        totals.host_us["pack"] += record.pack_us
        totals.host_us["dispatch"] += record.dispatch_us

    def _collected(self, record: Collected) -> None:
        now, totals = record.time_us, self._totals
        before = totals.prompt_tokens + totals.output_tokens
        sequences = set(record.sequences)
        steady = sequences & self._last_sequences
        if steady:
            # Sequences with a token in the previous step too have the same inter-token time.
            totals.inter_token.observe(now - totals.last_ready_us, len(steady))
        for sequence in sequences - steady:
            live = self._live[sequence]
            if live.token_us:
                totals.inter_token.observe(now - live.token_us[-1])
            else:
                totals.prompt_tokens += live.prompt_tokens
                totals.ttft.observe(now - live.arrival_us)
        self._append_tokens(record, sequences)
        for drafted in record.drafts:
            live = self._live[drafted.sequence]
            live.drafts = live.drafts.after(drafted)
            totals.drafts = totals.drafts.after(drafted)
            for place in range(drafted.num_tokens):
                position = str(place)
                num_accepted = totals.accepted_by_position.get(position, 0)
                accepted = place < drafted.num_accepted
                totals.accepted_by_position[position] = num_accepted + accepted
        if sequences:
            totals.step_tokens.observe(totals.prompt_tokens + totals.output_tokens - before)
        self._last_sequences = sequences
        totals.steps += 1
        totals.host_us["wait"] += record.wait_us
        # Steps run serially: this one began when it was called or when the last one ended.
        totals.device_busy_us += now - max(self._in_flight.pop(record.step), totals.last_ready_us)
        totals.last_ready_us = now

    def _append_tokens(self, record: Collected, sequences: set[int]) -> None:
        live, now = self._live, record.time_us
        if record.counts is not None:
            self._end_streaks()
            for sequence, count in zip(record.sequences, record.counts):
                live[sequence].token_us.extend(repeat(now, count))
            self._totals.output_tokens += sum(record.counts)
            return
        self._settle(self._in_streak - sequences)
        for sequence in sequences - self._in_streak:
            live[sequence].streak_start = len(self._step_us)
        self._in_streak = sequences
        self._step_us.append(now)
        self._totals.output_tokens += len(sequences)
        if len(self._step_us) == _MAX_STREAK:
            self._end_streaks()

    def _settle(self, sequences: Iterable[int]) -> None:
        """Gives sequences in a streak their token times."""
        for sequence in sequences:
            live = self._live[sequence]
            live.token_us.extend(self._step_us[live.streak_start :])
            live.streak_start = len(self._step_us)

    def _end_streaks(self) -> None:
        self._settle(self._in_streak)
        self._in_streak = set()
        self._step_us.clear()

    def _transferred(self, record: Transferred) -> None:
        totals = self._totals
        if record.error is None:
            way = f"{record.source}-{record.target}"
            spent_us = record.time_us - record.begin_us
            totals.transferred_bytes[way] = totals.transferred_bytes.get(way, 0) + record.bytes
            totals.transfer_us[way] = totals.transfer_us.get(way, 0) + spent_us

    def _phase(self, record: Phase) -> None:
        totals = self._totals
        if record.kind == "compile":
            totals.programs_compiled += 1
        else:
            spent_us = record.time_us - record.begin_us
            totals.startup_us[record.name] = totals.startup_us.get(record.name, 0) + spent_us
