"""Exports the event log as a timeline file, for ui.perfetto.dev or chrome://tracing.

Chrome's Trace TraceEvent Format: a JSON object with a list `traceEvents`, whose `ts` and `dur` are
microseconds, here from the first event on. Three processes are shown:

* `engine`: the host phases of each step (schedule, pack, dispatch, wait) on one track, the device's
  steps on another, and counters;
* `requests`: one track per sequence, with its queueing, prefill chunks, decoding and preemptions;
* `startup`: startup phases and compiles, on as many tracks as ran concurrently.

The host does not see when the device begins or ends a step. A step is drawn from the call of its
program, or the end of the step before it, until its tokens reached the host: never shorter than it
was, and exact when the host was waiting for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

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

_ENGINE, _REQUESTS, _STARTUP = 1, 2, 3
_HOST, _DEVICE = 1, 2

TraceEvent = dict[str, Any]


def write_trace(path: str | os.PathLike[str], records: Iterable[Record]) -> None:
    """Writes the timeline of `records` of an `EventLog(keep_all=True)`. Raises OSError."""
    document = {"traceEvents": trace_events(records), "displayTimeUnit": "ms"}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(document, file, separators=(",", ":"))


def trace_events(records: Iterable[Record]) -> list[TraceEvent]:
    """The events of the timeline: the names of the tracks, then all others in order of time.

    `records` may stop anywhere: open spans of sequences are then drawn up to the last record, and
    steps in flight are left out.
    """
    return _Timeline().events(list(records))


@dataclass(slots=True, eq=False)
class _Chunk:
    """A prefill chunk in flight, and the times between which its sequence was running."""

    sequence: int
    tokens: int
    earliest_us: int
    latest_us: int | None = None


@dataclass(slots=True)
class _Track:
    """The current span of a sequence, its start, and its chunks in flight."""

    span: str
    since_us: int
    chunks: list[_Chunk] = field(default_factory=list)


class _Timeline:
    def __init__(self) -> None:
        self._events: list[TraceEvent] = []
        self._names: list[TraceEvent] = []
        self._tracks: dict[int, _Track] = {}
        self._running = 0
        self._in_flight: dict[int, tuple[Dispatched, list[_Chunk]]] = {}
        self._ready_us = 0
        self._directions: dict[tuple[str, str], int] = {}
        self._lane_free_us: list[int] = []
        self._folds = {
            Arrived: self._arrived,
            Admitted: self._scheduled,
            Resumed: self._scheduled,
            Preempted: self._preempted,
            Finished: self._ended,
            Failed: self._ended,
            Dispatched: self._dispatched,
            Collected: self._collected,
            Transferred: self._transferred,
            Phase: self._phase,
        }

    def events(self, records: list[Record]) -> list[TraceEvent]:
        for pid, process in ((_ENGINE, "engine"), (_REQUESTS, "requests"), (_STARTUP, "startup")):
            self._name("process_name", pid, 0, process)
        self._name("thread_name", _ENGINE, _HOST, "host")
        self._name("thread_name", _ENGINE, _DEVICE, "device")
        # Phases are logged when they end; tracks are assigned in order of their beginning.
        phases = [record for record in records if isinstance(record, Phase)]
        others = [record for record in records if not isinstance(record, Phase)]
        for record in (*sorted(phases, key=lambda phase: phase.begin_us), *others):
            self._folds[type(record)](record)
        last_us = max((record.time_us for record in records), default=0)
        for sequence in tuple(self._tracks):
            self._leave(sequence, last_us)
        self._events.sort(key=lambda event: event["ts"])
        if self._events:
            first_us = self._events[0]["ts"]
            for event in self._events:
                event["ts"] -= first_us
        return self._names + self._events

    # Sequences: "queued", then "prefill" and "decode", with "preempted" in between.

    def _arrived(self, record: Arrived) -> None:
        self._tracks[record.sequence] = _Track("queued", record.time_us)
        name = f"{record.request_id} (sequence {record.sequence})"
        self._name("thread_name", _REQUESTS, _tid(record.sequence), name)

    def _scheduled(self, record: Admitted | Resumed) -> None:
        self._leave(record.sequence, record.time_us)
        self._tracks[record.sequence] = _Track("prefill", record.time_us)
        self._running += 1

    def _preempted(self, record: Preempted) -> None:
        self._leave(record.sequence, record.time_us)
        self._tracks[record.sequence] = _Track("preempted", record.time_us)
        self._running -= 1
        self._instant(record, "preempted")

    def _ended(self, record: Finished | Failed) -> None:
        track = self._leave(record.sequence, record.time_us)
        self._running -= track.span in ("prefill", "decode")
        if isinstance(record, Finished):
            self._instant(record, record.reason)
        else:
            self._instant(record, "error", error=record.error)
        self._count_sequences(record.time_us)

    def _leave(self, sequence: int, time_us: int) -> _Track:
        """Ends the current span of a sequence, and truncates its chunks in flight."""
        track = self._tracks.pop(sequence)
        for chunk in track.chunks:
            chunk.latest_us = time_us
        if track.span != "prefill":  # Prefill is drawn as its chunks.
            self._span(_REQUESTS, _tid(sequence), track.span, track.since_us, time_us)
        return track

    # Steps

    def _dispatched(self, record: Dispatched) -> None:
        chunks = []
        for sequence, tokens in record.prefill:
            track = self._tracks[sequence]
            chunk = _Chunk(sequence, tokens, earliest_us=track.since_us)
            track.chunks.append(chunk)
            chunks.append(chunk)
        self._in_flight[record.step] = record, chunks
        host = (
            ("schedule", record.begin_us, record.scheduled_us),
            ("pack", record.scheduled_us, record.packed_us),
            ("dispatch", record.packed_us, record.time_us),
        )
        for name, begin_us, end_us in host:
            self._span(_ENGINE, _HOST, name, begin_us, end_us, step=record.step)
        self._counter(
            "tokens a step",
            record.packed_us,
            decode=record.decode_rows,
            prefill=record.prefill_tokens,
            padding=record.padded_tokens,
        )
        self._counter("pages used", record.packed_us, pages=record.pages_used)
        self._count_sequences(record.packed_us)

    def _collected(self, record: Collected) -> None:
        step, chunks = self._in_flight.pop(record.step)
        begin_us, end_us = max(step.packed_us, self._ready_us), record.time_us
        self._ready_us = end_us
        self._span(_ENGINE, _HOST, "wait", record.begin_us, end_us, step=record.step)
        self._span(
            _ENGINE,
            _DEVICE,
            step.program,
            begin_us,
            end_us,
            step=record.step,
            decode_rows=step.decode_rows,
            prefill_tokens=step.prefill_tokens,
            padded_tokens=step.padded_tokens,
            draft_tokens=sum(drafted.num_tokens for drafted in record.drafts),
            accepted_tokens=sum(drafted.num_accepted for drafted in record.drafts),
            prefix_kv_bytes=step.prefix_kv_bytes,
            prefix_kv_bytes_alone=step.prefix_kv_bytes_alone,
        )
        # A token in flight when its sequence was preempted does not start the next decode.
        prefilling = {chunk.sequence for chunk in chunks if chunk.latest_us is None}
        for chunk in chunks:
            self._chunk(chunk, step, begin_us, end_us)
        for sequence in prefilling.intersection(record.sequences):
            self._tracks[sequence] = _Track("decode", end_us)

    def _chunk(self, chunk: _Chunk, step: Dispatched, begin_us: int, end_us: int) -> None:
        begin_us = max(begin_us, chunk.earliest_us)
        if chunk.latest_us is None:
            self._tracks[chunk.sequence].chunks.remove(chunk)
        else:
            end_us = min(end_us, chunk.latest_us)
        if begin_us <= end_us:
            tid = _tid(chunk.sequence)
            arguments = {"step": step.step, "tokens": chunk.tokens}
            self._span(_REQUESTS, tid, "prefill", begin_us, end_us, **arguments)

    def _transferred(self, record: Transferred) -> None:
        """Each direction has a track: one thread runs its transfers one after another."""
        direction = record.source, record.target
        if direction not in self._directions:
            self._directions[direction] = _DEVICE + 1 + len(self._directions)
            self._name(
                "thread_name",
                _ENGINE,
                self._directions[direction],
                f"KV {direction[0]} to {direction[1]}",
            )
        why = {"error": record.error} if record.error else {}
        self._span(
            _ENGINE,
            self._directions[direction],
            "failed" if record.error else "transfer",
            record.begin_us,
            record.time_us,
            pages=record.pages,
            bytes=record.bytes,
            **why,
        )

    def _phase(self, record: Phase) -> None:
        """Uses the first free track, since compiles overlap and phases contain them."""
        free = self._lane_free_us
        lane = next((i for i, us in enumerate(free) if us <= record.begin_us), len(free))
        if lane == len(free):
            free.append(0)
            self._name("thread_name", _STARTUP, _tid(lane), f"track {lane}")
        free[lane] = record.time_us
        self._span(_STARTUP, _tid(lane), record.name, record.begin_us, record.time_us)

    # Events of the format

    def _name(self, what: str, pid: int, tid: int, name: str) -> None:
        self._names.append(
            {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
        )

    def _span(
        self, pid: int, tid: int, name: str, begin_us: int, end_us: int, **arguments: int | str
    ) -> None:
        self._events.append(
            {
                "ph": "X",
                "name": name,
                "pid": pid,
                "tid": tid,
                "ts": begin_us,
                "dur": end_us - begin_us,
                "args": arguments,
            }
        )

    def _instant(self, record: Preempted | Finished | Failed, name: str, **arguments: str) -> None:
        self._events.append(
            {
                "ph": "i",
                "s": "t",
                "name": name,
                "pid": _REQUESTS,
                "tid": _tid(record.sequence),
                "ts": record.time_us,
                "args": arguments,
            }
        )

    def _counter(self, name: str, time_us: int, **series: int) -> None:
        self._events.append(
            {"ph": "C", "name": name, "pid": _ENGINE, "ts": time_us, "args": series}
        )

    def _count_sequences(self, time_us: int) -> None:
        waiting = len(self._tracks) - self._running
        self._counter("sequences", time_us, running=self._running, waiting=waiting)


def _tid(index: int) -> int:
    """Track 0 of a process is the process itself."""
    return index + 1
