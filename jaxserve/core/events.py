"""The event log, with timestamps in integer microseconds.

All time measurements (metrics, the fluidity index, the timeline file, a simulator's calibration)
are derived from these records only, so that replaying a log gives the same numbers as live
metrics. A step is two records with the tokens of all its sequences; there are no records per token.

The unit is the *sequence*: a request with n > 1 is n sequences that share a `request_id`.
Sequences and steps are identified by integers that the engine never reuses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

EndReason = Literal["stop", "length", "abort"]
PhaseKind = Literal["startup", "compile"]


def monotonic_us() -> int:
    return time.monotonic_ns() // 1000


class Arrived(NamedTuple):
    """A sequence arrived and started waiting: number `index` of its request's `n`."""

    time_us: int
    sequence: int
    request_id: str
    prompt_tokens: int
    max_tokens: int | None = None
    index: int = 0
    n: int = 1


class Admitted(NamedTuple):
    """A sequence was scheduled for the first time.

    `cached_tokens` of its prompt were found in the prefix cache.
    """

    time_us: int
    sequence: int
    cached_tokens: int


class Preempted(NamedTuple):
    """A running sequence was preempted and is waiting again."""

    time_us: int
    sequence: int


class Resumed(NamedTuple):
    """A preempted sequence was scheduled again."""

    time_us: int
    sequence: int


class Finished(NamedTuple):
    """A sequence ended, in any state, without an error."""

    time_us: int
    sequence: int
    reason: EndReason


class Failed(NamedTuple):
    """A sequence ended with an error."""

    time_us: int
    sequence: int
    error: str


class Dispatched(NamedTuple):
    """A step was dispatched to the device; `time_us` is when the program call returned.

    The host scheduled from `begin_us` to `scheduled_us`, packed until `packed_us`, and spent
    the rest calling the program. `prefill` lists the chunks as (sequence, tokens), and
    `padded_tokens` counts the bucket's rows without a token. `prefix_kv_bytes` are those of the
    pages that groups of decodes share, read once a group, and `prefix_kv_bytes_alone` what they
    would be if every decode read them for itself.
    """

    time_us: int
    step: int
    program: str
    begin_us: int
    scheduled_us: int
    packed_us: int
    decode_rows: int
    prefill: tuple[tuple[int, int], ...]
    padded_tokens: int
    pages_used: int
    pages_total: int
    prefix_kv_bytes: int = 0
    prefix_kv_bytes_alone: int = 0

    @property
    def schedule_us(self) -> int:
        return self.scheduled_us - self.begin_us

    @property
    def pack_us(self) -> int:
        return self.packed_us - self.scheduled_us

    @property
    def dispatch_us(self) -> int:
        return self.time_us - self.packed_us

    @property
    def prefill_tokens(self) -> int:
        return sum(tokens for _, tokens in self.prefill)


class DraftTree(NamedTuple):
    """The drafts of a sequence in a step, as nodes of a tree; a chain is one without branches.

    Node 0 is the sequence's newest token and node i + 1 the draft `token_ids[i]`, -1 where it was
    missing, which follows node `parents[i]`. `accepted` are the accepted nodes, in order.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    accepted: tuple[int, ...]


class VerifiedDrafts(NamedTuple):
    """A step verified `num_tokens` drafts of a sequence, and accepted some.

    `tree` has them one by one: on a device, in a log that keeps all records, else None.
    """

    sequence: int
    num_tokens: int
    num_accepted: int
    tree: DraftTree | None = None


class Collected(NamedTuple):
    """The tokens of a step reached the host, at `time_us`, after a wait since `begin_us`.

    `sequences` received output tokens, `counts` of them each (None: one each). A sequence's
    first appearance here is its first token. `drafts` are those of the sequences that had any in
    the step. `late`: the devices were done before `begin_us`.
    """

    time_us: int
    step: int
    begin_us: int
    sequences: tuple[int, ...]
    counts: tuple[int, ...] | None
    drafts: tuple[VerifiedDrafts, ...] = ()
    late: bool = False

    @property
    def wait_us(self) -> int:
        return self.time_us - self.begin_us


class Transferred(NamedTuple):
    """A transfer of KV pages between two tiers ended; `error` is the cause if it failed."""

    time_us: int
    source: str
    target: str
    pages: int
    bytes: int
    begin_us: int
    error: str | None


class Phase(NamedTuple):
    """Work outside the engine loop, from `begin_us` to `time_us`: a startup phase or a compile."""

    time_us: int
    kind: PhaseKind
    name: str
    begin_us: int


Record = (
    Arrived
    | Admitted
    | Preempted
    | Resumed
    | Finished
    | Failed
    | Dispatched
    | Collected
    | Transferred
    | Phase
)


class EventLog:
    """Timestamps records and passes each to every sink, in the same order for all sinks.

    Sinks aggregate records without storing them, so that a server's memory is bounded; `keep_all`
    also stores every record in `records`, which grows without bound, for a timeline file or a
    replay. Any thread may write. A sink runs under the log's lock: it must be quick and must not
    write to the log.
    """

    def __init__(
        self,
        *sinks: Callable[[Record], None],
        clock: Callable[[], int] = monotonic_us,
        keep_all: bool = False,
    ):
        """`clock` returns integer microseconds and never runs backwards; it may be virtual."""
        self.now = clock
        self.records: list[Record] = []
        self.keeps_all = keep_all
        self._sinks = (*sinks, self.records.append) if keep_all else sinks
        self._lock = threading.Lock()

    def arrived(
        self,
        sequence: int,
        request_id: str,
        prompt_tokens: int,
        max_tokens: int | None = None,
        index: int = 0,
        n: int = 1,
    ) -> None:
        self._stamp(Arrived, sequence, request_id, prompt_tokens, max_tokens, index, n)

    def admitted(self, sequence: int, cached_tokens: int = 0) -> None:
        self._stamp(Admitted, sequence, cached_tokens)

    def preempted(self, sequence: int) -> None:
        self._stamp(Preempted, sequence)

    def resumed(self, sequence: int) -> None:
        self._stamp(Resumed, sequence)

    def finished(self, sequence: int, reason: EndReason) -> None:
        self._stamp(Finished, sequence, reason)

    def failed(self, sequence: int, error: str) -> None:
        self._stamp(Failed, sequence, error)

    def dispatched(
        self,
        step: int,
        program: str,
        *,
        begin_us: int,
        scheduled_us: int,
        packed_us: int,
        decode_rows: int,
        prefill: Iterable[tuple[int, int]],
        padded_tokens: int,
        pages_used: int,
        pages_total: int,
        prefix_kv_bytes: int = 0,
        prefix_kv_bytes_alone: int = 0,
    ) -> None:
        """Call right after the program was called, and after the step's `admitted`/`resumed`."""
        self._stamp(
            Dispatched,
            step,
            program,
            begin_us,
            scheduled_us,
            packed_us,
            decode_rows,
            tuple(prefill),
            padded_tokens,
            pages_used,
            pages_total,
            prefix_kv_bytes,
            prefix_kv_bytes_alone,
        )

    def collected(
        self,
        step: int,
        sequences: Iterable[int],
        counts: Iterable[int] | None = None,
        *,
        drafts: Iterable[VerifiedDrafts] = (),
        begin_us: int,
        ready_us: int,
        late: bool = False,
    ) -> None:
        """Call once per step, in step order, before the `finished` of the step's sequences.

        The host waited from `begin_us` to `ready_us`. Omit sequences that ended before: their
        surplus token is discarded.
        """
        counts = None if counts is None else tuple(counts)
        with self._lock:
            self._write(
                Collected(ready_us, step, begin_us, tuple(sequences), counts, tuple(drafts), late)
            )

    def transferred(
        self,
        source: str,
        target: str,
        *,
        pages: int,
        num_bytes: int,
        begin_us: int,
        end_us: int,
        error: str | None,
    ) -> None:
        with self._lock:
            self._write(Transferred(end_us, source, target, pages, num_bytes, begin_us, error))

    @contextmanager
    def phase(self, kind: PhaseKind, name: str) -> Iterator[None]:
        """Times its body, which may run concurrently with others; logs nothing if it raises."""
        begin_us = self.now()
        yield
        self._stamp(Phase, kind, name, begin_us)

    def _stamp(self, kind: type[Record], *fields: object) -> None:
        with self._lock:
            self._write(kind(self.now(), *fields))

    def _write(self, record: Record) -> None:
        for sink in self._sinks:
            sink(record)
