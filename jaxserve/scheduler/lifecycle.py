"""The life of a sequence in the scheduler: queued, admitted, run, preempted, finished."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from jaxserve.core.sequence import Sequence, SequenceState
from jaxserve.core.steps.plan import ScheduledChunk
from jaxserve.kv.manager import KVManager, Match
from jaxserve.kv.page_table import PageTable
from jaxserve.scheduler.admission import kv_limit
from jaxserve.scheduler.config import SchedulerConfig
from jaxserve.scheduler.request_queue import FairQueue, WaitingQueue
from jaxserve.scheduler.shared_prefixes import SharedPrefixes

by_order = attrgetter("order")


class SequenceLifecycle:
    """Owns the waiting and running sequences and their slots, and makes every change of their
    state; the KV manager owns their pages.

    A planned step counts as dispatched: its sequences are advanced immediately. Reassigning pages
    or a slot while an earlier step still uses them is safe because the device runs steps in
    dispatch order.
    """

    def __init__(
        self, config: SchedulerConfig, kv: KVManager, waiting: WaitingQueue | FairQueue
    ) -> None:
        self.config = config
        self.kv = kv
        self.pool = kv.pool
        self.waiting = waiting
        self.running: list[Sequence] = []
        self.tables: dict[int, PageTable] = {}
        """Page tables of all unfinished sequences, by `seq_id`."""
        self._unfinished: dict[int, Sequence] = {}
        self._prefilled: list[Sequence] = []
        self._fetching: set[Sequence] = set()
        self._draining: list[Sequence] = []
        self._admitted: list[ScheduledChunk] = []
        self._resumed: list[Sequence] = []
        self._preempted: list[Sequence] = []
        self._prefixes = SharedPrefixes(kv)
        self._num_steps = 0
        self._most_drafts = config.draft_lengths[-1]
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished, including those whose last token is not yet read."""
        return bool(self._unfinished)

    def add(self, seq: Sequence) -> None:
        """Adds a new sequence to the waiting queue.

        Raises RequestError for an empty prompt, PromptTooLongError for one that leaves no room in
        the context or that, with its `max_tokens`, can never fit the pool.
        """
        capacity, host_kv = self.pool.capacity, self.kv.host_limits
        limit = kv_limit(seq, self.config.max_model_len, capacity, self.kv.layout, host_kv)
        seq.kv_limit = min(seq.kv_limit or limit, limit)  # A restored one has its own.
        seq.priority_ageing_us = self.config.priority_ageing_us
        seq.set_priority(seq.priority)
        seq.num_speculative_tokens = self._most_drafts
        self.waiting.add(seq)
        self._unfinished[seq.seq_id] = seq
        self.tables[seq.seq_id] = self.kv.new_table(seq.token_ids, seq.salt, seq.kv_limit)
        self._prefixes.join(seq)

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """Finishes a sequence and frees its pages and slot. No-op if it has already finished."""
        if seq.finished:
            return
        if seq.waiting:
            self.waiting.remove(seq)
            self.kv.unpin_table(self.tables[seq.seq_id])
        elif seq.slot is not None:
            self._release(seq)
        self._prefixes.leave(seq)
        self.waiting.finished(seq)
        seq.transition(SequenceState.FINISHED)
        seq.finish_reason = reason
        seq.stop_reason = stop_reason
        del self._unfinished[seq.seq_id], self.tables[seq.seq_id]

    def abort(self, seq_id: int) -> bool:
        """Finishes a sequence with reason "abort"; False if no such sequence is unfinished."""
        seq = self._unfinished.get(seq_id)
        if seq is None:
            return False
        self.finish(seq, "abort")
        return True

    def preempt(self, seq: Sequence) -> None:
        """Releases a running sequence's pages and slot, and returns it to the waiting queue.

        No-op if it is not running, or if only its last token is left to read.
        """
        if seq.state not in (SequenceState.ADMITTED, SequenceState.RUNNING):
            return
        if seq.state is SequenceState.RUNNING:
            self._preempted.append(seq)
        swap = self.kv.prefers_swap(self.tables[seq.seq_id], seq.num_written)
        seq.num_prefilled = max(seq.num_prefilled, seq.num_computed)
        self._release(seq, pin=swap, keep=swap)
        seq.num_computed = 0
        seq.num_preemptions += 1
        seq.transition(SequenceState.WAITING)
        self.waiting.add(seq)

    def preempt_all(self) -> None:
        """Preempts every running sequence; all that has been computed of any, prompts that were
        scored included, is computed again. No step may be in flight."""
        for seq in reversed(tuple(self.running)):
            self.preempt(seq)
        for seq in self._unfinished.values():
            seq.num_prefilled = 0

    def set_priority(self, seq_id: int, priority: int) -> bool:
        """Changes a sequence's priority and so its position in the waiting queue or among the
        running sequences; False if no such sequence is unfinished."""
        seq = self._unfinished.get(seq_id)
        if seq is None:
            return False
        if seq.waiting:
            self.waiting.set_priority(seq, priority)
        elif seq.slot is not None:
            _remove(self.running, seq)
            seq.set_priority(priority)
            insort(self.running, seq, key=by_order)
        return True

    def set_arrival(self, seq_id: int, arrival_us: int) -> None:
        """Changes when a sequence arrived, and so its position, if it is unfinished."""
        seq = self._unfinished.get(seq_id)
        if seq is not None:
            seq.arrival_us = arrival_us
            self.set_priority(seq_id, seq.priority)

    def _begin_step(self) -> None:
        """Releases the sequences whose last token is sampled, and makes those runnable whose pages
        have arrived."""
        for seq in self._prefilled:
            self._note_written(seq)
        self._prefilled.clear()
        for seq in self._draining:
            if seq.slot is not None:
                self._release(seq)
        self._draining.clear()
        self._end_fetches()
        self._num_steps += 1

    def _take_changes(
        self,
    ) -> tuple[tuple[ScheduledChunk, ...], tuple[Sequence, ...], tuple[Sequence, ...]]:
        """What was admitted, resumed and preempted since the last call, for a StepPlan."""
        preempted = (seq for seq in self._preempted if not seq.finished)
        changes = tuple(self._admitted), tuple(self._resumed), tuple(preempted)
        for events in (self._admitted, self._resumed, self._preempted):
            events.clear()
        return changes

    def _admit(self, seq: Sequence, match: Match, num_tokens: int) -> None:
        """Runs a waiting sequence, with pages for `num_tokens` tokens, those of the match first."""
        self.waiting.remove(seq)
        if not seq.started and not seq.num_preemptions:
            self.waiting.charge(seq, seq.num_tokens - match.num_tokens, 0)
        table = self.tables[seq.seq_id]
        self.kv.allocate(table, match, num_tokens)
        seq.slot = self._free_slots.pop()
        seq.prefill_end = seq.num_tokens
        seq.transition(SequenceState.ADMITTED)
        insort(self.running, seq, key=by_order)
        if self.kv.is_fetching(table):
            self._fetching.add(seq)
        else:
            seq.num_computed = match.num_tokens
        self._prefixes.lead(seq)

    def _end_fetches(self) -> None:
        """Makes sequences runnable whose pages have arrived."""
        for seq in tuple(self._fetching):
            table = self.tables[seq.seq_id]
            if self.kv.is_fetching(table):
                continue
            self._fetching.remove(seq)
            if self.kv.windowed and self.kv.fetch_failed(table):
                self.preempt(seq)
            else:
                seq.num_computed = table.num_cached

    def _advance(
        self,
        seq: Sequence,
        num_tokens: int,
        table: PageTable,
        num_drafts: int = 0,
        num_lookahead_tokens: int = 0,
    ) -> ScheduledChunk:
        """Schedules a sequence's next tokens and advances it past them."""
        start = seq.num_computed
        end = start + num_tokens
        samples = end >= seq.prefill_end
        num_uploaded = table.upload()
        chunk = ScheduledChunk(
            seq,
            start,
            num_tokens,
            samples,
            seq.num_output,
            seq.slot,
            table.pages,
            num_uploaded,
            num_drafts,
            num_lookahead_tokens,
        )
        if table.others:
            chunk = chunk._replace(others=tuple((own.pages, own.upload()) for own in table.others))
        if table.num_host_pages:
            chunk = chunk._replace(host_pages=table.on_host)
        seq.num_computed = end
        if seq.state is SequenceState.ADMITTED:
            if seq.started:
                self._resumed.append(seq)
            else:
                self._admitted.append(chunk)
            seq.transition(SequenceState.RUNNING)
        if start < seq.prefill_end:
            self._prefilled.append(seq)
        if samples:
            self.waiting.charge(seq, 0, 1)
            seq.num_in_flight += 1
            seq.num_drafts_in_flight += num_drafts
            seq.ready_at = self._num_steps + self.config.num_stages
            self._drain_at_limit(seq)
        return chunk

    def _count_accepted(self, seq: Sequence) -> None:
        """Counts a draft of a running sequence as computed, once it was accepted."""
        seq.num_computed = min(seq.num_computed + 1, seq.kv_limit)
        self._drain_at_limit(seq)

    def _drain_at_limit(self, seq: Sequence) -> None:
        """Marks a sequence whose last token is sampled; its memory is freed after this step."""
        if seq.num_computed == seq.kv_limit and seq.state is SequenceState.RUNNING:
            seq.transition(SequenceState.DRAINING)
            self._draining.append(seq)

    def _release(self, seq: Sequence, *, pin: bool = False, keep: bool = True) -> None:
        """Removes a sequence from the running ones and releases its pages and slot."""
        self._note_written(seq)
        self._fetching.discard(seq)
        _remove(self.running, seq)
        self.kv.release(self.tables[seq.seq_id], seq.num_written, pin=pin, keep=keep)
        self._free_slots.append(seq.slot)
        seq.slot = None

    def _note_written(self, seq: Sequence) -> None:
        """Makes a sequence's computed pages available to the prefix cache."""
        if seq.slot is None:
            return
        table = self.tables[seq.seq_id]
        self.kv.cache_pages(table, seq.num_written)
        self._prefixes.computed(seq, table)


def _remove(queue: list[Sequence], seq: Sequence) -> None:
    """Removes a sequence from a queue sorted by order."""
    del queue[bisect_left(queue, seq.order, key=by_order)]
