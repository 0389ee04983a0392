"""Which tokens of which sequences the next step computes.

One procedure for every policy (`policies.py`): decodes, prefills in progress, then admissions,
within a token budget. It knows no clock and no device: state and the time in, `StepPlan` out.

Liveness. Sequences are ordered by priority and then by arrival, or with ageing by arrival, priority
counted as so much time (`Sequence.order`). The victim of a preemption is always the last that runs.
So the first can take every page it needs, `add` has checked that each sequence fits the pool, and
it finishes. Admission stops at the first waiting sequence that does not fit. (Those that wait for
another to compute their prefix, or for a move, are passed over: the other runs, and moves end or
are waited for no longer.) A victim returns only when its pages and a margin are free, which the
page that displaced it rules out until another sequence gives pages back; and it displaces in turn
only those of a worse priority. Urgency does as order does in the end: it has a bound within a
level, and those who reached it go by their order (`slack.py`).

So a sequence finishes once no more arrive that are ordered before it. With ageing these are
finitely many, and no sequence starves. With strict levels a sequence starves for as long as those
of better levels take all there is: that is what strict means.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from operator import attrgetter

from jaxserve.engine.admission import AdmissionRule
from jaxserve.engine.kv_limit import kv_limit
from jaxserve.engine.plan import Chunk, StepPlan
from jaxserve.engine.policies import POLICIES
from jaxserve.engine.scheduler_config import SchedulerConfig
from jaxserve.engine.sequence import Sequence, Status
from jaxserve.engine.shared_prefix import SharedPrefix
from jaxserve.engine.shares import Shares, TimedShares
from jaxserve.engine.slack import RelativeSlack
from jaxserve.engine.step_time import StepLoad, StepTime
from jaxserve.engine.waiting import FairQueue, SlackQueue, WaitingQueue
from jaxserve.kv.manager import KVManager, Match
from jaxserve.kv.table import PageTable

_order = attrgetter("order")


class Scheduler:
    """Owns the waiting and running sequences and their slots; their pages are the KV manager's.

    Every call is made between steps. What `schedule` plans is taken as dispatched: it advances
    the sequences at once. Giving pages or a slot to another sequence while an earlier step still
    uses them is safe because the device runs steps in the order they were dispatched.
    """

    def __init__(self, config: SchedulerConfig, kv: KVManager) -> None:
        self.config = config
        self.policy = POLICIES[config.policy]
        self.kv = kv
        self.pool = kv.pool
        self.step_time = self._slack = None
        self.waiting: WaitingQueue | FairQueue = WaitingQueue()
        if self.policy.chunk == "timed":
            self.step_time = StepTime(config.buckets, config.num_stages)
            self._slack = RelativeSlack(self.step_time, config.target_step_us)
            self.waiting = SlackQueue(self._slack.urgency)
        if config.fair_share:
            self.waiting = FairQueue()
        self.running: list[Sequence] = []
        self._prefilled: list[Sequence] = []
        self._fetching: set[Sequence] = set()
        self._unfinished: dict[int, Sequence] = {}
        self._exhausted: list[Sequence] = []
        self._num_steps = 0
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._admission = AdmissionRule.of(config, self.pool.capacity, self.pool.page_size)

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished, be it only that its last token is not yet read."""
        return bool(self._unfinished)

    def tables(self) -> list[PageTable]:
        """Page tables of all unfinished sequences."""
        return [seq.table for seq in self._unfinished.values()]

    def add(self, seq: Sequence) -> None:
        """Puts a new sequence in the waiting queue.

        Raises RequestError for an empty prompt, PromptTooLongError for one that leaves no room in
        the context or that, with its `max_tokens`, can never fit the pool.
        """
        limit = kv_limit(seq, self.config.max_model_len, self.pool)
        seq.kv_limit = min(seq.kv_limit or limit, limit)  # One that was restored has its own.
        seq.priority_ageing_us = self.config.priority_ageing_us
        seq.set_priority(seq.priority)
        self.waiting.add(seq)
        self._unfinished[seq.seq_id] = seq
        for prefix in seq.prefixes:
            prefix.num_members += 1

    def schedule(self, now_us: int = 0) -> StepPlan:
        """Plans the next step and advances its sequences as if it had run.

        `now_us` is the time on the clock of `Sequence.arrival_us`; it matters where prefills go by
        their slack. The plan is empty when nothing can run before more tokens are collected or
        added.
        """
        if self._slack is not None:
            self._slack.now_us = now_us
        for seq in self._prefilled:
            self._note_written(seq)
        self._prefilled.clear()
        for seq in self._exhausted:
            if seq.slot is not None:
                self._release(seq)
        self._exhausted.clear()
        self._end_fetches()
        self._num_steps += 1
        budget = self.config.max_num_batched_tokens
        decodes: list[Chunk] = []
        preempted = self._preempt_for_priority()
        if self.policy.prefill == "alone":
            prefills = self._plan_prefills(budget, decodes)
            if not prefills:
                decodes = self._plan_decodes(preempted)
        else:
            decodes = self._plan_decodes(preempted)
            prefills = self._plan_prefills(budget - len(decodes), decodes)
        plan = StepPlan(tuple(decodes), tuple(prefills), tuple(preempted))
        if self.step_time is not None:
            self.step_time.dispatched(StepLoad.of(plan))
        return plan

    def took(self, plans: Iterable[StepPlan], us: int) -> None:
        """Learns what a dispatch took, where steps are planned by that. It worked on all of these
        plans at once: one, or in a pipeline one for each stage, some of them empty."""
        if self.step_time is not None:
            self.step_time.observe(StepLoad.together(map(StepLoad.of, plans)), us)

    def collect(self, chunk: Chunk, token_id: int) -> bool:
        """Appends the token that `chunk` sampled, in dispatch order; True if it was kept.

        A sequence preempted since keeps it, for it was computed from the right context. One that
        has finished since (the stop was seen a step late) drops it.
        """
        seq = chunk.seq
        seq.num_in_flight -= 1
        if seq.status is Status.FINISHED:
            return False
        seq.output_token_ids.append(token_id)
        if seq.slot is not None:
            num_written = seq.num_written
            if num_written // self.pool.page_size > len(seq.table.nodes):
                self.kv.written(seq.table, num_written)
        return True

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a sequence and frees its pages and slot at once. Does nothing if it has ended."""
        if seq.finished:
            return
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
            self.kv.forsake(seq.table)
        elif seq.slot is not None:
            self._release(seq)
        for prefix in seq.prefixes:
            self._leave(prefix)
        self.waiting.finished(seq)
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        seq.stop_reason = stop_reason
        del self._unfinished[seq.seq_id]

    def abort(self, seq_id: int) -> bool:
        """Finishes a sequence with reason "abort"; False if no such sequence is unfinished."""
        seq = self._unfinished.get(seq_id)
        if seq is None:
            return False
        self.finish(seq, "abort")
        return True

    def preempt(self, seq: Sequence) -> None:
        """Takes a running sequence's pages and slot, and has it wait for its turn again.

        Does nothing to one that does not run, or that has only its last token to be read.
        """
        if seq.slot is None or seq in self._exhausted:
            return
        swap = self.kv.prefers_swap(seq.table, seq.num_written)
        seq.num_prefilled = max(seq.num_prefilled, seq.num_computed)
        self._release(seq, pin=swap, keep=swap)
        seq.num_computed = 0
        seq.num_preemptions += 1
        seq.status = Status.WAITING
        self.waiting.add(seq)

    def set_priority(self, seq_id: int, priority: int) -> bool:
        """Gives a sequence another priority, for its place among those that wait and those that
        run; False if no such sequence is unfinished."""
        seq = self._unfinished.get(seq_id)
        if seq is None:
            return False
        if seq.status is Status.WAITING:
            self.waiting.set_priority(seq, priority)
        elif seq.slot is not None:
            _remove(self.running, seq)
            seq.set_priority(priority)
            insort(self.running, seq, key=_order)
        return True

    # Preemption

    def _preempt_for_priority(self) -> list[Sequence]:
        """Makes room for the first waiting sequence among those of a worse priority."""
        preempted: list[Sequence] = []
        first = next(iter(self.waiting), None)
        if first is None or self.policy.pages == "reserve" or first.num_in_flight:
            return preempted
        displaced = [seq for seq in self.running if self._outranks(first, seq)]
        if not displaced or any(prefix.keeps_waiting(first) for prefix in first.prefixes):
            return preempted
        held = Counter(page for seq in displaced for page in seq.pages)
        theirs = sum(self.pool.refs(page) == count for page, count in held.items())
        room = self.pool.num_available + theirs
        if room < self._admission_pages(first) + self._admission.watermark_pages:
            return preempted
        if self.kv.match(first.table, first.num_reusable).arriving:
            return preempted
        for seq in sorted(displaced, key=_order, reverse=True):
            if self._fit(first) is not None:
                break
            self.preempt(seq)
            preempted.append(seq)
        return preempted

    def _outranks(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether a waiting sequence goes before a running one: by a better priority that no ageing
        outweighs. Under `fair_share` it must be of the same tenant, or all tenants would claim the
        best priority there is."""
        if self.config.fair_share and waiting.tenant != running.tenant:
            return False
        return waiting.priority < running.priority and waiting.order < running.order

    # Decodes

    def _plan_decodes(self, preempted: list[Sequence]) -> list[Chunk]:
        """One token of every prefilled sequence, preempting from the end when pages run out.

        In a pipeline a sequence's next token is there when the last has left it. Each step takes
        one part in as many as there are stages, so that every stage has one to work on.
        """
        page_size = self.pool.page_size
        prefilled = sum(seq.num_computed >= seq.prefill_end for seq in self.running)
        most = math.ceil(prefilled / self.config.num_stages)
        chunks = []
        for seq in tuple(self.running):
            if seq.slot is None or len(chunks) == most:
                break  # Preempted by one before it, and so is everyone behind it.
            if seq.num_computed < seq.prefill_end or seq.ready_at > self._num_steps:
                continue
            if seq.num_computed == len(seq.table.pages) * page_size:
                while seq.slot is not None and not self.kv.extend(seq.table):
                    preempted.append(self.running[-1])
                    self.preempt(self.running[-1])
                if seq.slot is None:
                    break
            chunks.append(self._advance(seq, 1))
        return chunks

    # Prefills

    def _plan_prefills(self, room: int, decodes: list[Chunk]) -> list[Chunk]:
        """Chunks of prefills in progress and of sequences admitted for this step."""
        config = self.config
        room = min(room, config.max_prefill_tokens)
        if self.policy.chunk == "timed":
            load = StepLoad.of(StepPlan(tuple(decodes)))
            shares = TimedShares(
                config, self.step_time, self._slack, load, room, self._in_progress()
            )
            self._share_by_urgency(shares)
        else:
            shares = Shares(self.policy.chunk, room, config.min_chunk_tokens)
            self._share_by_order(shares)
        return [self._advance(seq, share) for seq, share in shares.taken]

    def _share_by_order(self, shares: Shares) -> None:
        """Prefills in progress first, then admissions, but for those that outrank them."""
        if not self.policy.joins:
            self._admit_batch()
        in_progress = deque(self._in_progress())
        if self.policy.joins:
            for seq in self.waiting:
                self._share_in_progress(shares, in_progress, before=seq)
                if shares.full or not self._admit_into(shares, seq):
                    break
        self._share_in_progress(shares, in_progress)

    def _share_in_progress(
        self, shares: Shares, in_progress: deque[Sequence], before: Sequence | None = None
    ) -> None:
        """Gives prefills in progress their shares in turn, up to the first that a waiting sequence
        outranks, or that gets none."""
        while in_progress and not shares.full:
            if before is not None and self._outranks(before, in_progress[0]):
                return
            seq = in_progress.popleft()
            if not shares.take(seq, seq.remaining):
                in_progress.clear()

    def _share_by_urgency(self, shares: TimedShares) -> None:
        """The most urgent first, in progress or admitted for this step."""
        for seq in self.waiting:
            shares.give_running(before=seq)
            if shares.passes_over(seq):
                continue
            if shares.full or not self._admit_into(shares, seq):
                break
        shares.give_running()
        shares.finish()

    def _in_progress(self) -> Iterator[Sequence]:
        """Running sequences that can prefill."""
        for seq in self.running:
            if seq.num_computed < seq.prefill_end and not seq.table.fetches:
                yield seq

    def _admit_into(self, shares: Shares | TimedShares, seq: Sequence) -> bool:
        """Admits a waiting sequence if it fits and gets a share; False if those behind it must
        wait for it."""
        if any(prefix.keeps_waiting(seq) for prefix in seq.prefixes):
            return True
        match = self._fit(seq)
        if match is None:
            return False
        if match.arriving:
            return True
        # Whoever must fetch pages first runs when they have come.
        if not match.must_fetch and not shares.take(seq, seq.num_tokens - match.num_tokens):
            return False
        self._admit(seq, match)
        return True

    def _admit_batch(self) -> None:
        """Forms the next batch of a policy whose batches nobody joins."""
        if self.running:
            return
        for seq in self.waiting:
            match = self._fit(seq)
            if match is None:
                break
            if not match.arriving:
                self._admit(seq, match)

    # Bookkeeping

    def _fit(self, seq: Sequence) -> Match | None:
        """What a waiting sequence finds computed, if it can be admitted now, or is arriving."""
        if not self._free_slots or seq.num_in_flight:
            return None  # The host must know every token that is to be recomputed.
        match = self.kv.match(seq.table, seq.num_reusable)
        margin = self._admission.margin(len(self.running))
        if match.arriving or self.kv.fits(match, self._admission_pages(seq), margin):
            return match
        return None

    def _admission_pages(self, seq: Sequence) -> int:
        return self._admission.pages(seq.num_tokens, seq.kv_limit)

    def _admit(self, seq: Sequence, match: Match) -> None:
        self.waiting.remove(seq)
        if not seq.num_preemptions:
            self.waiting.charge(seq, seq.num_tokens - match.num_tokens, 0)
        self.kv.take(seq.table, match, self._admission_pages(seq))
        seq.slot = self._free_slots.pop()
        seq.prefill_end = seq.num_tokens
        seq.status = Status.RUNNING
        insort(self.running, seq, key=_order)
        if seq.table.fetches:
            self._fetching.add(seq)
        else:
            seq.num_computed = match.num_tokens
        for prefix in seq.prefixes:
            if not prefix.ready:
                prefix.leader = seq

    def _end_fetches(self) -> None:
        """Lets those run whose pages have come."""
        for seq in [seq for seq in self._fetching if not seq.table.fetches]:
            self._fetching.remove(seq)
            seq.num_computed = seq.table.num_cached

    def _release(self, seq: Sequence, *, pin: bool = False, keep: bool = True) -> None:
        """Takes a sequence out of the running ones, with its pages and its slot."""
        self._note_written(seq)
        self._fetching.discard(seq)
        _remove(self.running, seq)
        self.kv.release(seq.table, seq.num_written, pin=pin, keep=keep)
        self._free_slots.append(seq.slot)
        seq.slot = None

    def _note_written(self, seq: Sequence) -> None:
        """Has what a sequence has computed found by others."""
        if seq.slot is None:
            return
        self.kv.written(seq.table, seq.num_written)
        for prefix in seq.prefixes:
            if prefix.leader is seq and not prefix.ready and seq.num_written >= prefix.num_tokens:
                self.kv.written(seq.table, seq.num_written, partial=True)
                prefix.ready = True
                prefix.nodes = seq.table.nodes[: self.pool.pages_for(prefix.num_tokens)]
                self.kv.pin(prefix.nodes)

    def _leave(self, prefix: SharedPrefix) -> None:
        prefix.num_members -= 1
        if not prefix.num_members:
            self.kv.unpin(prefix.nodes)
            prefix.nodes = []

    def _advance(self, seq: Sequence, num_tokens: int) -> Chunk:
        """Takes a sequence's next tokens as computed."""
        start = seq.num_computed
        end = start + num_tokens
        samples = end >= seq.prefill_end
        chunk = Chunk(seq, start, num_tokens, samples, seq.num_output, seq.slot)
        seq.num_computed = end
        if start < seq.prefill_end:
            self._prefilled.append(seq)
        if samples:
            self.waiting.charge(seq, 0, 1)
            seq.num_in_flight += 1
            seq.ready_at = self._num_steps + self.config.num_stages
            if end == seq.kv_limit:  # All its tokens are sampled: its memory is free after this.
                self._exhausted.append(seq)
        return chunk


def _remove(queue: list[Sequence], seq: Sequence) -> None:
    """Removes a sequence from a queue sorted by order."""
    del queue[bisect_left(queue, seq.order, key=_order)]
