"""Metrics derived from the event log while it is written.

`Metrics.fold` is a sink of `EventLog`. A live sequence has its token times; one that ended
becomes a summary and counts in histograms, and only the latest summaries are stored. Replaying a
log's records into a new `Metrics` gives the same result.

Metric names of vLLM have the same meaning here; as in vLLM, each sequence counts as one request.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Literal

from jaxserve.core.events import (
    Admitted,
    Arrived,
    Collected,
    Dispatched,
    Failed,
    Finished,
    Moved,
    Phase,
    Preempted,
    Record,
    Resumed,
)
from jaxserve.core.requests.outputs import RequestMetrics
from jaxserve.metrics.fluidity import INTERACTIVE, Deadlines
from jaxserve.metrics.statistics import Histogram, HistogramValue
from jaxserve.metrics.summaries import (
    NO_DRAFTS,
    LiveSequence,
    SequenceSummary,
    request_metrics,
)

_SECOND_US = 1_000_000
_MAX_STREAK = 4096
"""Steps whose times are stored in common at most."""


def _bounds_us(*milliseconds: int) -> tuple[int, ...]:
    return tuple(ms * 1_000 for ms in milliseconds)


# The bucket bounds of vLLM's histograms, so that its dashboards work here.
# fmt: off
_TTFT_BOUNDS_US = _bounds_us(
    1, 5, 10, 20, 40, 60, 80, 100, 250, 500, 750, 1_000, 2_500, 5_000, 7_500, 10_000, 20_000,
    40_000, 80_000, 160_000, 640_000, 2_560_000,
)
_INTER_TOKEN_BOUNDS_US = _bounds_us(
    10, 25, 50, 75, 100, 150, 200, 300, 400, 500, 750, 1_000, 2_500, 5_000, 7_500, 10_000, 20_000,
    40_000, 80_000,
)
_E2E_BOUNDS_US = _bounds_us(
    300, 500, 800, 1_000, 1_500, 2_000, 2_500, 5_000, 10_000, 15_000, 20_000, 30_000, 40_000,
    50_000, 60_000, 120_000, 240_000, 480_000, 960_000, 1_920_000, 7_680_000,
)
# fmt: on
_N_BOUNDS = (1, 2, 5, 10, 20)
_PREEMPTIONS_BOUNDS = (0, 1, 2, 5, 10, 20)
_STEP_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# vLLM ends these at the context limit, which the event log does not know.
_TOKENS_BOUNDS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_FLUIDITY_BOUNDS_PERCENT = (10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100)


@dataclass(frozen=True)
class Metric:
    """A snapshot of one metric, in the form that an exporter needs.

    `value` is a number or a `HistogramValue`; with `label` set it is a dict of numbers, one
    for each value of that label; of kind "info" it is a dict of labels, exported as a gauge of 1.
    Names of counters end in `_total`; times are in seconds.
    """

    kind: Literal["counter", "gauge", "histogram", "info"]
    help: str
    value: float | HistogramValue | dict[str, float] | dict[str, str]
    label: str | None = None


_counter = partial(Metric, "counter")
_gauge = partial(Metric, "gauge")
_histogram = partial(Metric, "histogram")


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
            Moved: self._moved,
            Phase: self._phase,
        }

        self._live: dict[int, LiveSequence] = {}
        self._ended: OrderedDict[int, SequenceSummary] = OrderedDict()
        self._ended_by_reason = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._running = 0
        self._preemptions = 0
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._drafts = NO_DRAFTS
        self._accepted_by_position: dict[str, int] = {}
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._ttft = Histogram(_TTFT_BOUNDS_US, _SECOND_US)
        self._inter_token = Histogram(_INTER_TOKEN_BOUNDS_US, _SECOND_US)
        self._e2e = Histogram(_E2E_BOUNDS_US, _SECOND_US)
        self._queue = Histogram(_E2E_BOUNDS_US, _SECOND_US)
        self._prefill = Histogram(_E2E_BOUNDS_US, _SECOND_US)
        self._decode = Histogram(_E2E_BOUNDS_US, _SECOND_US)
        self._inference = Histogram(_E2E_BOUNDS_US, _SECOND_US)
        self._mean_inter_token = Histogram(_INTER_TOKEN_BOUNDS_US, _SECOND_US)
        self._request_prompt = Histogram(_TOKENS_BOUNDS, 1)
        self._request_computed = Histogram(_TOKENS_BOUNDS, 1)
        self._request_output = Histogram(_TOKENS_BOUNDS, 1)
        self._request_preemptions = Histogram(_PREEMPTIONS_BOUNDS, 1)
        self._max_tokens = Histogram(_TOKENS_BOUNDS, 1)
        self._n = Histogram(_N_BOUNDS, 1)
        self._step_tokens = Histogram(_STEP_TOKENS_BOUNDS, 1)
        self._fluidity = Histogram(_FLUIDITY_BOUNDS_PERCENT, 100)
        self._token_deadlines = {"met": 0, "missed": 0}

        self._steps = 0
        self._last_sequences: set[int] = set()  # with tokens in the step collected last
        # Nearly every sequence has a token in every step. Those in a streak share the times of the
        # latest steps, and get their part of them when they miss a step, or end.
        self._step_us: list[int] = []
        self._in_streak: set[int] = set()
        self._prefill_tokens = 0
        self._padded_tokens = 0
        self._prefix_kv_bytes = {"once": 0, "alone": 0}
        self._host_us = {"schedule": 0, "pack": 0, "dispatch": 0, "wait": 0}
        self._in_flight: dict[int, int] = {}  # step -> time of its program call [us]
        self._first_call_us: int | None = None
        self._last_ready_us = 0
        self._device_busy_us = 0
        self._moved_bytes: dict[str, int] = {}  # by direction
        self._move_us: dict[str, int] = {}
        self._startup_us: dict[str, int] = {}
        self._programs_compiled = 0

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
            return {**self._vllm_metrics(), **self._own_metrics(now_us or self._last_ready_us)}

    def _vllm_metrics(self) -> dict[str, Metric]:
        waiting = len(self._live) - self._running
        metrics = {
            "num_requests_running": _gauge("Running sequences", self._running),
            "num_requests_waiting": _gauge("Waiting sequences, preempted ones included", waiting),
            "num_requests_waiting_by_reason": _gauge(
                "Waiting sequences, all of them for room in a step or the KV cache",
                {"capacity": waiting},
                "reason",
            ),
            "num_preemptions_total": _counter("Preemptions", self._preemptions),
            "prompt_tokens_total": _counter("Prompt tokens prefilled", self._prompt_tokens),
            "generation_tokens_total": _counter("Tokens generated", self._output_tokens),
            "prefix_cache_queries_total": _counter(
                "Prompt tokens looked up in the prefix cache", self._prefix_queries
            ),
            "prefix_cache_hits_total": _counter(
                "Prompt tokens found in the prefix cache", self._prefix_hits
            ),
            "spec_decode_num_drafts_total": _counter("Drafts verified", self._drafts.num_drafts),
            "spec_decode_num_draft_tokens_total": _counter(
                "Draft tokens verified", self._drafts.num_draft_tokens
            ),
            "spec_decode_num_accepted_tokens_total": _counter(
                "Draft tokens accepted", self._drafts.num_accepted_tokens
            ),
            "spec_decode_num_accepted_tokens_per_pos_total": _counter(
                "Draft tokens accepted, by place in their draft",
                dict(self._accepted_by_position),
                "position",
            ),
            "request_success_total": _counter(
                "Sequences ended", dict(self._ended_by_reason), "finished_reason"
            ),
            "time_to_first_token_seconds": _histogram("Arrival to first token", self._ttft.value()),
            "inter_token_latency_seconds": _histogram(
                "Time between steps with tokens of a sequence", self._inter_token.value()
            ),
            "e2e_request_latency_seconds": _histogram(
                "Arrival to finish, of completed sequences", self._e2e.value()
            ),
            "request_queue_time_seconds": _histogram(
                "Arrival to first step, of completed sequences", self._queue.value()
            ),
            "request_prefill_time_seconds": _histogram(
                "First step to first token, of completed sequences", self._prefill.value()
            ),
            "request_decode_time_seconds": _histogram(
                "First to last token, of completed sequences", self._decode.value()
            ),
            "request_inference_time_seconds": _histogram(
                "First step to last token, of completed sequences", self._inference.value()
            ),
            "request_time_per_output_token_seconds": _histogram(
                "Mean time between tokens, of completed sequences", self._mean_inter_token.value()
            ),
            "request_prompt_tokens": _histogram(
                "Prompt tokens of completed sequences", self._request_prompt.value()
            ),
            "request_prefill_kv_computed_tokens": _histogram(
                "Prompt tokens not found in the prefix cache, of completed sequences",
                self._request_computed.value(),
            ),
            "request_generation_tokens": _histogram(
                "Tokens generated, of completed sequences", self._request_output.value()
            ),
            "request_num_preemptions": _histogram(
                "Preemptions, of completed sequences", self._request_preemptions.value()
            ),
            "request_params_max_tokens": _histogram(
                "max_tokens of arrived sequences that set it", self._max_tokens.value()
            ),
            "request_params_n": _histogram("n of arrived requests", self._n.value()),
            "iteration_tokens_total": _histogram(
                "Output tokens of a step, with the prompts that it completed",
                self._step_tokens.value(),
            ),
        }
        return {f"vllm:{name}": metric for name, metric in metrics.items()}

    def _own_metrics(self, now_us: int) -> dict[str, Metric]:
        host_s = {part: us / _SECOND_US for part, us in self._host_us.items()}
        startup_s = {name: us / _SECOND_US for name, us in self._startup_us.items()}
        move_s = {way: us / _SECOND_US for way, us in self._move_us.items()}
        busy_s = self._device_busy_us / _SECOND_US
        metrics = {
            "fluidity_index": _histogram(
                "Fluidity index of completed sequences, 0..1", self._fluidity.value()
            ),
            "token_deadlines_total": _counter(
                "Token deadlines of completed sequences", dict(self._token_deadlines), "outcome"
            ),
            "steps_total": _counter("Steps collected", self._steps),
            "prefill_tokens_total": _counter(
                "Tokens computed in chunks, also again after a preemption", self._prefill_tokens
            ),
            "padded_tokens_total": _counter("Padding rows computed", self._padded_tokens),
            "prefix_kv_bytes_total": _counter(
                "KV of pages that groups of decodes share: read, once a group, and as it would be "
                "if every decode read it alone",
                dict(self._prefix_kv_bytes),
                "read",
            ),
            "host_seconds_total": _counter("Host time of steps", host_s, "part"),
            "device_busy_seconds_total": _counter("Time with a step on the device", busy_s),
            "device_busy_share": _gauge(
                "Share of time with a step on the device, from the first until now",
                self._busy_share(now_us),
            ),
            "kv_moved_bytes_total": _counter(
                "Bytes of KV transferred", dict(self._moved_bytes), "direction"
            ),
            "kv_move_seconds_total": _counter("Time of KV transfers", move_s, "direction"),
            "programs_compiled_total": _counter("Programs compiled", self._programs_compiled),
            "startup_seconds": _gauge("Time spent in each phase of startup", startup_s, "phase"),
        }
        return {f"jaxserve:{name}": metric for name, metric in metrics.items()}

    def _busy_share(self, now_us: int) -> float:
        if not self._steps:
            return 0.0
        return self._device_busy_us / max(1, now_us - self._first_call_us)

    # One method per record type.

    def _arrived(self, record: Arrived) -> None:
        self._live[record.sequence] = LiveSequence(
            record.request_id, record.time_us, record.prompt_tokens
        )
        if record.max_tokens is not None:
            self._max_tokens.observe(record.max_tokens)
        if record.index == 0:
            self._n.observe(record.n)

    def _admitted(self, record: Admitted) -> None:
        live = self._live[record.sequence]
        live.running = True
        live.admitted_us = record.time_us
        live.cached_tokens = record.cached_tokens
        self._running += 1
        self._prefix_queries += live.prompt_tokens
        self._prefix_hits += record.cached_tokens

    def _preempted(self, record: Preempted) -> None:
        live = self._live[record.sequence]
        live.running = False
        live.preemptions += 1
        self._running -= 1
        self._preemptions += 1

    def _resumed(self, record: Resumed) -> None:
        self._live[record.sequence].running = True
        self._running += 1

    def _finished(self, record: Finished) -> None:
        summary = self._end(record.sequence, record.time_us, record.reason)
        if record.reason == "abort":
            return  # Latencies are those of completed sequences only.
        self._e2e.observe(summary.e2e_us)
        self._observe_request(summary)
        self._fluidity.observe(int(summary.fluidity.index * 100))
        self._token_deadlines["met"] += summary.fluidity.met
        self._token_deadlines["missed"] += summary.fluidity.missed

    def _observe_request(self, summary: SequenceSummary) -> None:
        """The histograms with one observation for each completed sequence."""
        self._request_prompt.observe(summary.prompt_tokens)
        self._request_computed.observe(summary.prompt_tokens - summary.cached_tokens)
        self._request_output.observe(summary.output_tokens)
        self._request_preemptions.observe(summary.preemptions)
        if summary.admitted_us is None or summary.first_token_us is None:
            return  # It was restored with all of its tokens.
        decode_us = summary.last_token_us - summary.first_token_us
        self._queue.observe(summary.queue_us)
        self._prefill.observe(summary.first_token_us - summary.admitted_us)
        self._decode.observe(decode_us)
        self._inference.observe(summary.last_token_us - summary.admitted_us)
        self._mean_inter_token.observe(decode_us // max(1, summary.output_tokens - 1))

    def _failed(self, record: Failed) -> None:
        self._end(record.sequence, record.time_us, "error")

    def _end(self, sequence: int, time_us: int, reason: str) -> SequenceSummary:
        if sequence in self._in_streak:
            self._settle([sequence])
            self._in_streak = self._in_streak - {sequence}
        live = self._live.pop(sequence)
        self._running -= live.running
        self._ended_by_reason[reason] += 1
        summary = live.summarize(time_us, reason, self._deadlines, self._keep_tokens)
        self._ended[sequence] = summary
        if len(self._ended) > self._keep_finished:
            self._ended.popitem(last=False)
        return summary

    def _dispatched(self, record: Dispatched) -> None:
        self._in_flight[record.step] = record.packed_us
        if self._first_call_us is None:
            self._first_call_us = record.packed_us
        self._prefill_tokens += record.prefill_tokens
        self._padded_tokens += record.padded_tokens
        self._prefix_kv_bytes["once"] += record.prefix_kv_bytes
        self._prefix_kv_bytes["alone"] += record.prefix_kv_bytes_alone
        self._host_us["schedule"] += record.schedule_us
        self._host_us["pack"] += record.pack_us
        self._host_us["dispatch"] += record.dispatch_us

    def _collected(self, record: Collected) -> None:
        now = record.time_us
        before = self._prompt_tokens + self._output_tokens
        sequences = set(record.sequences)
        steady = sequences & self._last_sequences
        if steady:
            # Sequences with a token in the previous step too have the same inter-token time.
            self._inter_token.observe(now - self._last_ready_us, len(steady))
        for sequence in sequences - steady:
            live = self._live[sequence]
            if live.token_us:
                self._inter_token.observe(now - live.token_us[-1])
            else:
                self._prompt_tokens += live.prompt_tokens
                self._ttft.observe(now - live.arrival_us)
        self._append_tokens(record, sequences)
        for drafted in record.drafts:
            live = self._live[drafted.sequence]
            live.drafts = live.drafts.after(drafted)
            self._drafts = self._drafts.after(drafted)
            for place in range(drafted.num_tokens):
                position = str(place)
                num_accepted = self._accepted_by_position.get(position, 0)
                accepted = place < drafted.num_accepted
                self._accepted_by_position[position] = num_accepted + accepted
        if sequences:
            self._step_tokens.observe(self._prompt_tokens + self._output_tokens - before)
        self._last_sequences = sequences
        self._steps += 1
        self._host_us["wait"] += record.wait_us
        # Steps run serially: this one began when it was called or when the last one ended.
        self._device_busy_us += now - max(self._in_flight.pop(record.step), self._last_ready_us)
        self._last_ready_us = now

    def _append_tokens(self, record: Collected, sequences: set[int]) -> None:
        live, now = self._live, record.time_us
        if record.counts is not None:
            self._end_streaks()
            for sequence, count in zip(record.sequences, record.counts):
                live[sequence].token_us.extend(repeat(now, count))
            self._output_tokens += sum(record.counts)
            return
        self._settle(self._in_streak - sequences)
        for sequence in sequences - self._in_streak:
            live[sequence].streak_start = len(self._step_us)
        self._in_streak = sequences
        self._step_us.append(now)
        self._output_tokens += len(sequences)
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

    def _moved(self, record: Moved) -> None:
        if record.error is None:
            way = f"{record.source}-{record.target}"
            spent_us = record.time_us - record.begin_us
            self._moved_bytes[way] = self._moved_bytes.get(way, 0) + record.bytes
            self._move_us[way] = self._move_us.get(way, 0) + spent_us

    def _phase(self, record: Phase) -> None:
        if record.kind == "compile":
            self._programs_compiled += 1
        else:
            spent_us = record.time_us - record.begin_us
            self._startup_us[record.name] = self._startup_us.get(record.name, 0) + spent_us
