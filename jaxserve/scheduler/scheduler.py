"""The scheduler: plans which tokens of which sequences the next step computes.

One procedure for every policy (`policies.py`): decodes, prefills in progress, then admissions,
within a token budget. It has no clock and no device: state and time in, `StepPlan` out.

Liveness. Sequences are ordered by priority, then by arrival; with ageing, by arrival with the
priority converted to time (`Sequence.order`). Preemption always picks the last running sequence.
So the first sequence can get every page it needs, `add` has checked that it fits the pool, and it
finishes. Admission stops at the first waiting sequence that does not fit. (Sequences that wait for
another to compute their prefix, or for a transfer, are skipped: the other one runs, and transfers
complete or time out.) A preempted sequence is resumed only when its pages and a margin are free,
which requires another sequence to release pages first; and it preempts only sequences of a worse
priority. Urgency behaves like order in the limit: it is bounded within a level, and sequences at
the bound follow their order (`slack.py`).

So a sequence finishes once no more sequences ordered before it arrive. With ageing these are
finitely many, and no sequence starves. With strict levels a sequence starves for as long as better
levels use the whole capacity, by definition.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from operator import attrgetter

from jaxserve.core.sequence import Sequence, SequenceState
from jaxserve.core.step_plan import ScheduledChunk, StepPlan
from jaxserve.kv.manager import KVManager, Match
from jaxserve.kv.page_table import PageTable
from jaxserve.scheduler.admission import AdmissionRule, kv_limit
from jaxserve.scheduler.config import SchedulerConfig
from jaxserve.scheduler.policies import POLICIES
from jaxserve.scheduler.request_queue import FairQueue, SlackQueue, WaitingQueue
from jaxserve.scheduler.shared_prefixes import SharedPrefixes
from jaxserve.scheduler.slack import RelativeSlack
from jaxserve.scheduler.step_time import StepLoad, StepTime
from jaxserve.scheduler.token_budget import TimedTokenBudget, TokenBudget

_order = attrgetter("order")
_start = attrgetter("start")


class Scheduler:
    """Owns the waiting and running sequences and their slots; the KV manager owns their pages.

    All calls are made between steps. A planned step counts as dispatched: `schedule` advances the
    sequences immediately. Reassigning pages or a slot while an earlier step still uses them is
    safe because the device runs steps in dispatch order.
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
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self._admission = AdmissionRule.of(config, self.pool.capacity, kv.layout)

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
        limit = kv_limit(seq, self.config.max_model_len, self.pool.capacity, self.kv.layout)
        seq.kv_limit = min(seq.kv_limit or limit, limit)  # A restored one has its own.
        seq.priority_ageing_us = self.config.priority_ageing_us
        seq.set_priority(seq.priority)
        if seq.params.speculative:
            seq.num_speculative_tokens = self.config.num_speculative_tokens
        self.waiting.add(seq)
        self._unfinished[seq.seq_id] = seq
        self.tables[seq.seq_id] = self.kv.new_table(seq.token_ids, seq.salt)
        self._prefixes.join(seq)

    def schedule(self, now_us: int = 0) -> StepPlan:
        """Plans the next step and advances its sequences as if it had run.

        `now_us` is the time on the clock of `Sequence.arrival_us`, used to order prefills by slack.
        The plan is empty when nothing can run until tokens are collected or sequences added.
        """
        if self._slack is not None:
            self._slack.now_us = now_us
        for seq in self._prefilled:
            self._note_written(seq)
        self._prefilled.clear()
        for seq in self._draining:
            if seq.slot is not None:
                self._release(seq)
        self._draining.clear()
        self._end_fetches()
        self._num_steps += 1
        budget = self.config.max_num_batched_tokens
        decodes: list[ScheduledChunk] = []
        self._preempt_for_priority()
        if self.policy.prefill == "alone":
            prefills = self._plan_prefills(budget, decodes)
            if not prefills:
                decodes = self._plan_decodes()
        else:
            decodes = self._plan_decodes()
            used = StepPlan(tuple(decodes))
            prefills = self._plan_prefills(budget - len(decodes) * used.width, decodes)
        # Decode attention pads neighbouring rows to the longest of them.
        decodes.sort(key=_start, reverse=True)
        plan = StepPlan(
            tuple(decodes),
            tuple(prefills),
            tuple(self._admitted),
            tuple(self._resumed),
            tuple(seq for seq in self._preempted if not seq.finished),
        )
        for events in (self._admitted, self._resumed, self._preempted):
            events.clear()
        if self.step_time is not None:
            self.step_time.dispatched(StepLoad.of(plan))
        return plan

    def observe_step_time(self, plans: Iterable[StepPlan], us: int) -> None:
        """Updates the step time model, if the policy has one. The dispatch ran all of these plans
        together: one, or with pipeline stages one per stage, some of them empty."""
        if self.step_time is not None:
            self.step_time.observe(StepLoad.together(map(StepLoad.of, plans)), us)

    def collect(self, chunk: ScheduledChunk, token_id: int, place: int = 0) -> bool:
        """Appends a token that `chunk` sampled, in dispatch order; False if it was dropped. `place`
        counts the tokens of a decode: after the first they follow the drafts that were kept.

        A sequence preempted since keeps the token, for its context was correct. One that has
        finished since (the stop was seen a step late) drops it.
        """
        seq = chunk.seq
        if not place:
            seq.num_in_flight -= 1
            seq.num_drafts_in_flight -= chunk.num_drafts
        if seq.finished:
            return False
        seq.output_token_ids.append(token_id)
        if place:
            self.waiting.charge(seq, 0, 1)
        if place and seq.slot is not None:
            seq.num_computed = min(seq.num_computed + 1, seq.kv_limit)
            if seq.num_computed == seq.kv_limit and seq.state is SequenceState.RUNNING:
                self._drain(seq)
        if seq.slot is not None and token_id >= 0:  # Negative if none could be sampled.
            num_written, table = seq.num_written, self.tables[seq.seq_id]
            if num_written // self.pool.page_size > len(table.nodes):
                self.kv.cache_pages(table, num_written)
        return True

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
            insort(self.running, seq, key=_order)
        return True

    # Preemption

    def _preempt_for_priority(self) -> None:
        """Preempts running sequences of a worse priority for the first waiting sequence."""
        first = next(iter(self.waiting), None)
        if first is None or self.policy.pages == "reserve" or first.num_in_flight:
            return
        displaced = [seq for seq in self.running if self._outranks(first, seq)]
        if not displaced or self._prefixes.keep_waiting(first):
            return
        held = Counter(
            page
            for seq in displaced
            for table in self.tables[seq.seq_id].tables
            for page in table.held
        )
        theirs = sum(self.pool.refs(page) == count for page, count in held.items())
        room = self.pool.num_available + theirs
        wanted = self.kv.layout.pages_for(self._admission_tokens(first))
        if room < wanted + self._admission.watermark_pages:
            return
        if self.kv.match(self.tables[first.seq_id], first.num_reusable).arriving:
            return
        for seq in sorted(displaced, key=_order, reverse=True):
            if self._fit(first) is not None:
                break
            self.preempt(seq)

    def _outranks(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether a waiting sequence may preempt a running one: its priority is better, and ageing
        does not outweigh that. Under `fair_share` both must be of the same tenant, or every tenant
        would claim the best priority."""
        if self.config.fair_share and waiting.tenant != running.tenant:
            return False
        return waiting.priority < running.priority and waiting.order < running.order

    # Decodes

    def _plan_decodes(self) -> list[ScheduledChunk]:
        """A decode of every prefilled sequence, preempting from the end when pages run out. Pages
        are allocated as if every draft were kept.

        With pipeline stages, a sequence can decode only after its previous token has left the
        pipeline. Each step takes 1 / num_stages of the sequences, so that every stage is busy.
        """
        page_size = self.pool.page_size
        prefilled = sum(seq.num_computed >= seq.prefill_end for seq in self.running)
        most = math.ceil(prefilled / self.config.num_stages)
        chunks = []
        for seq in tuple(self.running):
            if seq.slot is None or len(chunks) == most:
                break  # Preempted by one before it, as are all after it; or the step has its share.
            if seq.num_computed < seq.prefill_end or seq.ready_at > self._num_steps:
                continue
            table = self.tables[seq.seq_id]
            end = seq.num_computed + 1
            num_drafts = min(seq.num_speculative_tokens, seq.kv_limit - end)
            lookahead = min(num_drafts + seq.num_drafts_in_flight, seq.kv_limit - end)
            needs_pages = end + lookahead > len(table.pages) * page_size
            if (needs_pages or self.kv.windowed) and not self._extend(seq, 1 + lookahead):
                break
            chunks.append(self._advance(seq, 1, table, num_drafts, lookahead))
        return chunks

    # Prefills

    def _plan_prefills(self, room: int, decodes: list[ScheduledChunk]) -> list[ScheduledChunk]:
        """Chunks of prefills in progress and of sequences admitted for this step."""
        config = self.config
        room = min(room, config.max_prefill_tokens)
        if self.policy.chunk == "timed":
            load = StepLoad.of(StepPlan(tuple(decodes)))
            budget = TimedTokenBudget(
                config, self.step_time, self._slack, load, room, self._in_progress()
            )
            self._share_by_urgency(budget)
        else:
            budget = TokenBudget(self.policy.chunk, room, config.min_chunk_tokens)
            self._share_by_order(budget)
        if self.kv.windowed:
            return self._extended(budget.taken, {chunk.seq for chunk in decodes})
        return [self._advance(seq, share, self.tables[seq.seq_id]) for seq, share in budget.taken]

    def _extended(
        self, shares: Iterable[tuple[Sequence, int]], planned: set[Sequence]
    ) -> list[ScheduledChunk]:
        """Chunks of those prefills that get the pages for them: of a group with a window, pages are
        taken as a prefill goes on. Sequences `planned` for this step keep theirs."""
        chunks = []
        for seq, share in shares:
            if seq.slot is not None and self._extend(seq, share, planned):
                chunks.append(self._advance(seq, share, self.tables[seq.seq_id]))
                planned.add(seq)
        return chunks

    def _extend(self, seq: Sequence, num_tokens: int, planned: Collection[Sequence] = ()) -> bool:
        """Gets the pages for a sequence's next tokens, preempting from the end; False if the last
        sequence is planned for this step, or is this one."""
        table, start = self.tables[seq.seq_id], seq.num_computed
        while not self.kv.extend(table, start, start + num_tokens):
            last = self.running[-1]
            if last in planned:
                return False
            self.preempt(last)
            if last is seq:
                return False
        return True

    def _share_by_order(self, budget: TokenBudget) -> None:
        """Prefills in progress first, except those that a waiting sequence outranks."""
        if not self.policy.joins:
            self._admit_batch()
        in_progress = deque(self._in_progress())
        if self.policy.joins:
            for seq in self.waiting:
                self._share_in_progress(budget, in_progress, before=seq)
                if budget.full or not self._admit_into(budget, seq):
                    break
        self._share_in_progress(budget, in_progress)

    def _share_in_progress(
        self, budget: TokenBudget, in_progress: deque[Sequence], before: Sequence | None = None
    ) -> None:
        """Gives prefills in progress their chunks in order, up to the first that `before` outranks
        or that gets none."""
        while in_progress and not budget.full:
            if before is not None and self._outranks(before, in_progress[0]):
                return
            seq = in_progress.popleft()
            if not budget.take(seq, seq.remaining):
                in_progress.clear()

    def _share_by_urgency(self, budget: TimedTokenBudget) -> None:
        """The most urgent prefills first, in progress or admitted for this step."""
        for seq in self.waiting:
            budget.give_running(before=seq)
            if budget.passes_over(seq):
                continue
            if budget.full or not self._admit_into(budget, seq):
                break
        budget.give_running()
        budget.finish()

    def _in_progress(self) -> Iterator[Sequence]:
        """Running sequences that have tokens left to prefill and are not fetching pages."""
        for seq in self.running:
            if seq.num_computed < seq.prefill_end and seq not in self._fetching:
                yield seq

    def _admit_into(self, budget: TokenBudget | TimedTokenBudget, seq: Sequence) -> bool:
        """Admits a waiting sequence if it fits and gets a chunk; False if admission must stop at
        it."""
        if self._prefixes.keep_waiting(seq):
            return True
        match = self._fit(seq)
        if match is None:
            return False
        if match.arriving:
            return True
        # A sequence that must fetch pages runs once they have arrived.
        if not match.must_fetch and not budget.take(seq, seq.num_tokens - match.num_tokens):
            return False
        self._admit(seq, match)
        return True

    def _admit_batch(self) -> None:
        """Forms the next batch of a policy whose running batches admit no sequences."""
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
        """A waiting sequence's prefix match, if it can be admitted now or is `arriving`."""
        if not self._free_slots or seq.num_in_flight:
            return None  # The host must know every token to recompute.
        match = self.kv.match(self.tables[seq.seq_id], seq.num_reusable)
        margin = self._admission.margin(len(self.running))
        if match.arriving or self.kv.fits(match, self._admission_tokens(seq), margin):
            return match
        return None

    def _admission_tokens(self, seq: Sequence) -> int:
        return self._admission.tokens(seq.num_tokens, seq.kv_limit)

    def _admit(self, seq: Sequence, match: Match) -> None:
        self.waiting.remove(seq)
        if not seq.started and not seq.num_preemptions:
            self.waiting.charge(seq, seq.num_tokens - match.num_tokens, 0)
        table = self.tables[seq.seq_id]
        self.kv.allocate(table, match, self._admission_tokens(seq))
        seq.slot = self._free_slots.pop()
        seq.prefill_end = seq.num_tokens
        seq.transition(SequenceState.ADMITTED)
        insort(self.running, seq, key=_order)
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
            if end == seq.kv_limit:
                self._drain(seq)
        return chunk

    def _drain(self, seq: Sequence) -> None:
        """Marks a sequence whose last token is sampled; its memory is freed after this step."""
        seq.transition(SequenceState.DRAINING)
        self._draining.append(seq)


def _remove(queue: list[Sequence], seq: Sequence) -> None:
    """Removes a sequence from a queue sorted by order."""
    del queue[bisect_left(queue, seq.order, key=_order)]
