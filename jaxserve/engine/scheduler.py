"""Which tokens of which sequences the next step computes.

One procedure for every policy (`policies.py`): decodes, prefills in progress, then admissions,
within a token budget. It knows no clock and no device: state in, `StepPlan` out.

Liveness. Both queues are ordered by (priority, arrival, id), admission stops at the first waiting
sequence that does not fit, and the victim of a preemption is always the last running sequence.
So the first running sequence can take every page it needs, `add` has checked that all of them fit
the pool, and it finishes. A victim returns only when its pages and a margin are free, which the
page that displaced it rules out until another sequence gives pages back.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from jaxserve.engine.plan import Chunk, StepPlan
from jaxserve.engine.policies import POLICIES
from jaxserve.engine.sequence import Sequence, Status
from jaxserve.errors import ConfigError, PromptTooLongError, RequestError
from jaxserve.kv.pages import PagePool

_order = attrgetter("order")


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step and rules of admission.

    max_num_seqs: sequences running at once, R.
    max_num_batched_tokens: token budget of a step, τ.
    max_prefill_chunks: sequences that can prefill in one step.
    max_prefill_tokens: prefill tokens of the largest program.
    max_model_len: context limit in tokens, prompt and output.
    watermark: share of the pool that an admission leaves free for sequences already running.
    min_chunk_tokens: no prompt is split into pieces below this, its last piece excepted.
    """

    policy: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_prefill_chunks: int
    max_prefill_tokens: int
    max_model_len: int
    watermark: float = 0.01
    min_chunk_tokens: int = 16

    def __post_init__(self) -> None:
        """Raises ConfigError when a limit is out of range or would starve prefills."""
        if self.policy not in POLICIES:
            raise ConfigError(f"unknown scheduler {self.policy!r}; one of {', '.join(POLICIES)}")
        for name in ("max_num_seqs", "max_prefill_chunks", "min_chunk_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_model_len < 2:
            raise ConfigError(f"max_model_len is {self.max_model_len}; it must be at least 2")
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is {self.watermark}; it must be in [0, 1)")
        if self.max_prefill_tokens < self.min_chunk_tokens:
            raise ConfigError(
                f"max_prefill_tokens is {self.max_prefill_tokens}; "
                f"it must be at least min_chunk_tokens, {self.min_chunk_tokens}"
            )
        least = self.max_num_seqs + self.min_chunk_tokens
        if self.max_num_batched_tokens < least:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; with max_num_seqs "
                f"{self.max_num_seqs} it must be at least {least}, or running sequences would "
                "leave no room for new prompts"
            )


class Scheduler:
    """Owns the waiting and running sequences, their pages and their slots.

    Every call is made between steps. What `schedule` plans is taken as dispatched: it advances
    the sequences at once. Giving pages or a slot to another sequence while an earlier step still
    uses them is safe because the device runs steps in the order they were dispatched.
    """

    def __init__(self, config: SchedulerConfig, pool: PagePool) -> None:
        self.config = config
        self.policy = POLICIES[config.policy]
        self.pool = pool
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._unfinished: dict[int, Sequence] = {}
        self._exhausted: list[Sequence] = []
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        # At least one page, so that a preempted sequence does not return into a full pool.
        self._watermark_pages = max(1, math.ceil(config.watermark * pool.capacity))

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

    def add(self, seq: Sequence) -> None:
        """Puts a new sequence in the waiting queue.

        Raises RequestError for an empty prompt, PromptTooLongError for one that leaves no room in
        the context or that, with its `max_tokens`, can never fit the pool.
        """
        length, context = seq.num_prompt, self.config.max_model_len
        if not length:
            raise RequestError("the prompt has no tokens; it needs at least one")
        if length >= context:
            raise PromptTooLongError(
                f"the prompt has {length} tokens and the context limit is {context}; "
                f"shorten it to at most {context - 1}"
            )
        room = context - length
        wanted = seq.params.max_tokens
        if wanted is None:  # As far as the context goes, or a pool that is smaller still.
            pool_tokens = self.pool.capacity * self.pool.page_size
            wanted = max(1, pool_tokens + 1 - length)
        max_tokens = min(wanted, room)
        seq.kv_limit = length + max_tokens - 1
        pages = self.pool.pages_for(seq.kv_limit)
        if pages > self.pool.capacity:
            raise PromptTooLongError(
                f"a prompt of {length} tokens with max_tokens {max_tokens} needs {pages} KV pages "
                f"and the pool has {self.pool.capacity}; prompt and max_tokens may add up to "
                f"{self.pool.capacity * self.pool.page_size + 1} tokens"
            )
        insort(self.waiting, seq, key=_order)
        self._unfinished[seq.seq_id] = seq

    def schedule(self) -> StepPlan:
        """Plans the next step and advances its sequences as if it had run.

        The plan is empty when nothing can run before more tokens are collected or added.
        """
        for seq in self._exhausted:
            if not seq.finished:
                self._release(seq)
        self._exhausted.clear()
        budget = self.config.max_num_batched_tokens
        decodes: list[Chunk] = []
        preempted: list[Sequence] = []
        if self.policy.prefill == "alone":
            prefills = self._plan_prefills(budget)
            if not prefills:
                decodes = self._plan_decodes(preempted)
        else:
            decodes = self._plan_decodes(preempted)
            prefills = self._plan_prefills(budget - len(decodes))
        return StepPlan(tuple(decodes), tuple(prefills), tuple(preempted))

    def collect(self, chunk: Chunk, token_id: int) -> bool:
        """Appends the token that `chunk` sampled, in dispatch order; True if it was kept.

        A sequence preempted since keeps it, for it was computed from the right context. One that
        has finished since (the stop was seen a step late) drops it.
        """
        seq = chunk.seq
        seq.num_in_flight -= 1
        if seq.finished:
            return False
        seq.output_token_ids.append(token_id)
        return True

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends a sequence and frees its pages and slot at once. Does nothing if it has ended."""
        if seq.finished:
            return
        if seq.status is Status.WAITING:
            _remove(self.waiting, seq)
        elif seq.slot is not None:
            self._release(seq)
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

    # Decodes

    def _plan_decodes(self, preempted: list[Sequence]) -> list[Chunk]:
        """One token of every prefilled sequence, preempting from the end when pages run out."""
        page_size = self.pool.page_size
        chunks = []
        for seq in tuple(self.running):
            if seq.slot is None:
                break  # Preempted by one before it, and so is everyone behind it.
            if seq.num_computed < seq.prefill_end:
                continue
            if seq.num_computed == len(seq.pages) * page_size:
                while not self.pool.num_free and seq.slot is not None:
                    preempted.append(self._preempt_last())
                if seq.slot is None:
                    break
                seq.pages += self.pool.allocate(1)
            chunks.append(self._advance(seq, 1))
        return chunks

    def _preempt_last(self) -> Sequence:
        """Takes the last running sequence's memory; what it had computed is computed again.

        The one place where a sequence loses its pages while it runs, and so where keeping them
        elsewhere would begin.
        """
        seq = self.running[-1]
        self._release(seq)
        seq.num_computed = 0
        seq.num_preemptions += 1
        seq.status = Status.WAITING
        insort(self.waiting, seq, key=_order)
        return seq

    # Prefills

    def _plan_prefills(self, budget: int) -> list[Chunk]:
        """Chunks of prefills in progress, then of sequences admitted for this step."""
        if not self.policy.joins:
            self._admit_batch()
        room = min(budget, self.config.max_prefill_tokens)
        shares: list[tuple[Sequence, int]] = []
        for seq in self._prefill_candidates():
            if shares and self.policy.chunk == "exact":
                room += self._take_back(
                    shares, min(seq.remaining, self.config.min_chunk_tokens) - room
                )
            share = self._share(seq.remaining, room, first=not shares)
            if not share:
                break
            if seq.status is Status.WAITING:
                self._admit(seq)
            shares.append((seq, share))
            room -= share
            if not room or len(shares) == self.config.max_prefill_chunks:
                break
        return [self._advance(seq, share) for seq, share in shares]

    def _share(self, left: int, room: int, first: bool) -> int:
        """Tokens of a sequence with `left` to prefill that go into `room`; 0 to stop here."""
        if left <= room or first or self.policy.chunk == "exact":
            return min(left, room)
        if self.policy.chunk == "whole" or room < self.config.min_chunk_tokens:
            return 0
        return room

    def _take_back(self, shares: list[tuple[Sequence, int]], wanted: int) -> int:
        """Shortens the last share by up to `wanted` tokens, not below the floor; returns by how
        many."""
        seq, share = shares[-1]
        taken = max(0, min(wanted, share - self.config.min_chunk_tokens))
        shares[-1] = (seq, share - taken)
        return taken

    def _prefill_candidates(self) -> Iterator[Sequence]:
        """Prefills in progress, then waiting sequences for as long as the first of them fits.

        Whoever takes a waiting sequence admits it before asking for the next.
        """
        yield from [seq for seq in self.running if seq.num_computed < seq.prefill_end]
        while self.policy.joins and self.waiting and self._fits(self.waiting[0]):
            yield self.waiting[0]

    def _admit_batch(self) -> None:
        """Forms the next batch of a policy whose batches nobody joins."""
        if not self.running:
            while self.waiting and self._fits(self.waiting[0]):
                self._admit(self.waiting[0])

    # Bookkeeping

    def _fits(self, seq: Sequence) -> bool:
        """Whether a waiting sequence can be admitted now."""
        if not self._free_slots or seq.num_in_flight:
            return False  # The host must know every token that is to be recomputed.
        margin = self._watermark_pages if self.running and self.policy.pages == "grow" else 0
        return self.pool.num_free - self._admission_pages(seq) >= margin

    def _admission_pages(self, seq: Sequence) -> int:
        tokens = seq.kv_limit if self.policy.pages == "reserve" else seq.num_tokens
        return self.pool.pages_for(tokens)

    def _admit(self, seq: Sequence) -> None:
        _remove(self.waiting, seq)
        seq.pages = self.pool.allocate(self._admission_pages(seq))
        seq.slot = self._free_slots.pop()
        seq.prefill_end = seq.num_tokens
        seq.status = Status.RUNNING
        insort(self.running, seq, key=_order)

    def _release(self, seq: Sequence) -> None:
        """Takes a sequence out of the running ones, with its pages and its slot."""
        _remove(self.running, seq)
        self.pool.free(seq.pages)
        self._free_slots.append(seq.slot)
        seq.pages = []
        seq.slot = None

    def _advance(self, seq: Sequence, num_tokens: int) -> Chunk:
        """Takes a sequence's next tokens as computed."""
        start = seq.num_computed
        end = start + num_tokens
        samples = end >= seq.prefill_end
        chunk = Chunk(seq, start, num_tokens, samples, seq.num_output, seq.slot)
        seq.num_computed = end
        if samples:
            seq.num_in_flight += 1
            if end == seq.kv_limit:  # All its tokens are sampled: its memory is free after this.
                self._exhausted.append(seq)
        return chunk


def _remove(queue: list[Sequence], seq: Sequence) -> None:
    """Removes a sequence from a queue sorted by order."""
    del queue[bisect_left(queue, seq.order, key=_order)]
