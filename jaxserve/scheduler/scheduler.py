"""The scheduler: plans which tokens of which sequences the next step computes.

One procedure for every policy (`policies.py`): decodes, prefills in progress, then admissions,
within a token budget. It has no clock and no device: state and time in, `StepPlan` out.

Liveness. Sequences are ordered by priority, then by arrival; with ageing, by arrival with the
priority converted to time (`Sequence.order`). Preemption always picks the last running sequence.
So the first sequence can get every page it needs, `add` has checked that it fits the pool, and it
finishes. Admission stops at the first waiting sequence that does not fit. (Sequences that wait for
another to compute their prefix, for a transfer, or for host pages are skipped: the other one runs,
transfers complete or time out, and host pages are given in order.) A preempted sequence is resumed
only when its pages and a margin are free, which requires another sequence to release pages first;
and it preempts only sequences of a worse priority. Urgency behaves like order in the limit: it is
bounded within a level, and sequences at the bound follow their order (`slack.py`).

So a sequence finishes once no more sequences ordered before it arrive. With ageing these are
finitely many, and no sequence starves. With strict levels a sequence starves for as long as better
levels use the whole capacity, by definition.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from operator import attrgetter

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.sequence import Sequence, SequenceState
from jaxserve.core.steps.plan import DecodeGroup, ScheduledChunk, StepPlan
from jaxserve.kv.manager import KVManager, Match
from jaxserve.scheduler.admission import AdmissionRule
from jaxserve.scheduler.config import SchedulerConfig
from jaxserve.scheduler.decode_groups import group_decodes
from jaxserve.scheduler.drafts import AdaptiveDraftLength, FixedDraftLength
from jaxserve.scheduler.lifecycle import SequenceLifecycle, by_order
from jaxserve.scheduler.policies import POLICIES
from jaxserve.scheduler.request_queue import FairQueue, SlackQueue, WaitingQueue
from jaxserve.scheduler.slack import RelativeSlack
from jaxserve.scheduler.step_time import StepLoad, StepTime
from jaxserve.scheduler.token_budget import TimedTokenBudget, TokenBudget

_log = logging.getLogger(__name__)
_start = attrgetter("start")


class Scheduler(SequenceLifecycle):
    """Plans steps. All calls are made between them."""

    def __init__(self, config: SchedulerConfig, kv: KVManager) -> None:
        self.policy = POLICIES[config.policy]
        self.step_time = self._slack = None
        waiting: WaitingQueue | FairQueue = WaitingQueue()
        self._drafts: FixedDraftLength | AdaptiveDraftLength = FixedDraftLength()
        if self.policy.chunk == "timed" or len(config.draft_lengths) > 2:
            self.step_time = StepTime(config.buckets, config.num_stages)
        if len(config.draft_lengths) > 2:
            self._drafts = AdaptiveDraftLength(config.draft_lengths, self.step_time)
        if self.policy.chunk == "timed":
            self._slack = RelativeSlack(self.step_time, config.target_step_us)
            waiting = SlackQueue(self._slack.urgency)
        if config.fair_share:
            waiting = FairQueue()
        self._drafter_works = self._warned_of_drafter = False
        self._awaits_host_pages = False
        super().__init__(config, kv, waiting)
        self._admission = AdmissionRule.of(config, self.pool.capacity, kv.layout, kv.host_limits)

    def schedule(self, now_us: int = 0) -> StepPlan:
        """Plans the next step and advances its sequences as if it had run.

        `now_us` is the time on the clock of `Sequence.arrival_us`, used to order prefills by slack.
        The plan is empty when nothing can run until tokens are collected or sequences added.
        """
        if self._slack is not None:
            self._slack.now_us = now_us
        self._begin_step()
        self._awaits_host_pages = False
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
        groups: tuple[DecodeGroup, ...] = ()
        if self.config.prefix_cost is not None:
            size = self.pool.page_size
            decodes, groups = group_decodes(decodes, size, self.config.prefix_cost)
        changes = self._take_changes()
        plan = StepPlan(tuple(decodes), tuple(prefills), *changes, decode_groups=groups)
        if self.step_time is not None:
            self.step_time.dispatched(StepLoad.of(plan))
        return plan

    def prefix_kv_bytes(self, plan: StepPlan) -> tuple[int, int]:
        """Bytes of KV that the groups of a plan share, as its step reads them, once a group, and as
        it would if every decode read them for itself."""
        if not plan.decode_groups:
            return 0, 0
        page_bytes = self.pool.page_size * self.config.prefix_cost.token_bytes
        once, alone = plan.prefix_page_reads
        return once * page_bytes, alone * page_bytes

    def observe_step_time(self, plans: Iterable[StepPlan], us: int) -> None:
        """Updates the step time model, if the policy has one. The dispatch ran all of these plans
        together: one, or with pipeline stages one per stage, some of them empty."""
        if self.step_time is not None:
            self.step_time.observe(StepLoad.together(map(StepLoad.of, plans)), us)

    def observe_drafts(self, chunk: ScheduledChunk, num_drafts: int, num_accepted: int) -> None:
        """Updates what is known of drafts with those of a decode: of the `num_drafts` that there
        were, `num_accepted` of them accepted. A drafter that should have computed some has computed
        NaN: it is switched off for the sequence, and for all if it has never computed any. Called
        before the step's tokens are collected."""
        seq = chunk.seq
        if not chunk.num_drafts:
            return
        self._drafts.observe(seq, chunk.num_drafts, num_accepted)
        if self.config.drafter is None:
            return
        # Drafts accepted by the step before may have left no room for those of a tree.
        room = chunk.stop - seq.num_prompt - len(seq.output_token_ids)
        if num_drafts:
            self._drafter_works = True
        elif seq.num_speculative_tokens and room > 0 and not seq.finished:
            self._stop_drafts(seq)

    def _stop_drafts(self, seq: Sequence) -> None:
        whose = f"request {seq.request_id} and others like it go"
        if not self._drafter_works:
            whose, self._most_drafts = "all requests go", 0
            for other in self._unfinished.values():
                other.num_speculative_tokens = 0
        seq.num_speculative_tokens = 0
        if not self._warned_of_drafter:
            self._warned_of_drafter = True
            _log.warning(
                "the drafter of speculative_config (%s) computes NaN; %s on without drafts, and "
                "with the same tokens. Check its weights; where float16 overflows, set dtype to "
                "'bfloat16' or 'float32'.",
                self.config.drafter,
                whose,
            )

    def collect(self, chunk: ScheduledChunk, token_id: int, token_index: int = 0) -> bool:
        """Appends a token that `chunk` sampled, in dispatch order; False if it was dropped.
        `token_index` counts the tokens of a decode: after the first they follow the drafts that
        were accepted.

        A sequence preempted since keeps the token, because its context was correct. One that has
        finished since (the stop was seen a step late) drops it.
        """
        seq = chunk.seq
        if not token_index:
            seq.num_in_flight -= 1
            seq.num_drafts_in_flight -= chunk.num_drafts
        if seq.state is SequenceState.FINISHED:
            return False
        seq.output_token_ids.append(token_id)
        if token_index:
            self.waiting.charge(seq, 0, 1)
        if token_index and seq.slot is not None:
            self._count_accepted(seq)
        if seq.slot is not None and token_id >= 0:  # Negative if none could be sampled.
            table = self.tables[seq.seq_id]
            page_end = (len(table.nodes) + 1) * self.pool.page_size
            if seq.num_computed >= page_end and seq.num_written >= page_end:
                self.kv.cache_pages(table, seq.num_written)
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
        table = self.tables[first.seq_id]
        host_pages = sum(self.tables[seq.seq_id].needs_host_pages for seq in displaced)
        if table.needs_host_pages > self.kv.num_free_host_pages + host_pages:
            return
        wanted = self.kv.pages_for(table, self._admission_tokens(first))
        if room < wanted + self._admission.watermark_pages:
            return
        if self.kv.match(table, first.num_reusable).arriving:
            return
        for seq in sorted(displaced, key=by_order, reverse=True):
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
        are allocated as if every draft were accepted.

        With pipeline stages, a sequence can decode only after its previous token has left the
        pipeline. Each step takes 1 / num_stages of the sequences, so that every stage is busy. Of
        steps that run together, each takes as many as fit it of those that are in none yet.
        """
        page_size = self.pool.page_size
        prefilled = [seq for seq in self.running if seq.num_computed >= seq.prefill_end]
        most = cdiv(len(prefilled), self.config.num_stages)
        together = self.config.steps_per_weight_read > 1
        if together:
            most = self.config.max_step_seqs
        self._drafts.choose(prefilled, self._expected_prefill_tokens)
        chunks = []
        for seq in tuple(self.running):
            if seq.slot is None or len(chunks) == most:
                break  # Preempted by one before it, as are all after it; or the step has its share.
            if seq.num_computed < seq.prefill_end or seq.ready_at > self._num_steps:
                continue
            if together and seq.num_in_flight:
                continue
            table = self.tables[seq.seq_id]
            end = seq.num_computed + 1
            num_drafts = lookahead = 0
            if seq.num_speculative_tokens or seq.num_drafts_in_flight:
                num_drafts = min(self._drafts.of(seq), seq.kv_limit - end)
                lookahead = min(num_drafts + seq.num_drafts_in_flight, seq.kv_limit - end)
            needs_pages = end + lookahead > len(table.pages) * page_size
            if (needs_pages or self.kv.windowed) and not self._extend(seq, 1 + lookahead):
                break
            chunks.append(self._advance(seq, 1, table, num_drafts, lookahead))
        return chunks

    # Prefills

    def _expected_prefill_tokens(self) -> int:
        """Tokens of prompts that a step may have beside its decodes, if they get their pages."""
        tokens = sum(seq.remaining for seq in self._in_progress())
        if self._free_slots and self.policy.joins:
            tokens += next((seq.remaining for seq in self.waiting), 0)
        return min(tokens, self.config.max_prefill_tokens)

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
            most = config.max_step_seqs - len(decodes)
            budget = TokenBudget(self.policy.chunk, room, config.min_chunk_tokens, most)
            self._share_by_order(budget)
        if self.kv.releases_pages:
            return self._extended(budget.taken, {chunk.seq for chunk in decodes})
        return [self._advance(seq, share, self.tables[seq.seq_id]) for seq, share in budget.taken]

    def _extended(
        self, shares: Iterable[tuple[Sequence, int]], planned: set[Sequence]
    ) -> list[ScheduledChunk]:
        """Chunks of those prefills that get the pages for them: of a group with a window, and of a
        sequence longer than the pool, pages are taken as a prefill continues. Sequences `planned`
        for this step keep theirs."""
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
        if self._prefixes.keep_waiting(seq) or self._lacks_host_pages(seq):
            return True
        match = self._fit(seq)
        if match is None:
            return False
        if match.arriving:
            return True
        # A sequence that must fetch pages runs once they have arrived.
        if not match.must_fetch and not budget.take(seq, seq.num_tokens - match.num_tokens):
            return False
        self._admit(seq, match, self._admission_tokens(seq))
        return True

    def _lacks_host_pages(self, seq: Sequence) -> bool:
        """Whether a waiting sequence, or one before it, lacks host pages that it needs. Those that
        fit the pool do not wait for these, which another may hold for as long as it runs."""
        num_pages = self.tables[seq.seq_id].needs_host_pages
        if not num_pages:
            return False
        self._awaits_host_pages |= num_pages > self.kv.num_free_host_pages
        return self._awaits_host_pages

    def _admit_batch(self) -> None:
        """Forms the next batch of a policy whose running batches admit no sequences."""
        if self.running:
            return
        for seq in self.waiting:
            match = self._fit(seq)
            if match is None:
                break
            if not match.arriving:
                self._admit(seq, match, self._admission_tokens(seq))

    # Bookkeeping

    def _fit(self, seq: Sequence) -> Match | None:
        """A waiting sequence's prefix match, if it can be admitted now or is `arriving`."""
        if not self._free_slots or seq.num_in_flight:
            return None  # The host must know every token to recompute.
        table = self.tables[seq.seq_id]
        match = self.kv.match(table, seq.num_reusable)
        margin = self._admission.margin(len(self.running))
        if match.arriving or self.kv.fits(match, self._admission_tokens(seq), margin, table):
            return match
        return None

    def _admission_tokens(self, seq: Sequence) -> int:
        return self._admission.tokens(seq.num_tokens, seq.kv_limit)
