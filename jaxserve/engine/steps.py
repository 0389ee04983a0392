"""Steps from plan to tokens: one is always dispatched before the last is read.

While the devices work on a step the host plans, packs and dispatches the next one, feeding it
tokens that only the devices know, and then reads the older step. So a stop condition is seen one
step late, and the token sampled in the meantime is dropped.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable

from jaxserve.engine.agreed_log import AgreedLog
from jaxserve.engine.events import EventLog
from jaxserve.engine.intake import NewRequest
from jaxserve.engine.plan import Chunk, StepPlan
from jaxserve.engine.request import Generation, Request, Stop, TokenScores
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import Sequence
from jaxserve.kv.rates import causal_pairs
from jaxserve.runtime.paging import Paging
from jaxserve.runtime.runner import Runner
from jaxserve.runtime.specs import part_name
from jaxserve.runtime.under_way import DispatchedStep, StepResults
from jaxserve.sampling import NO_TOKEN, TokenLogprobs, sequence_seed

_DISPATCHES_AHEAD = 1
"""Dispatches beyond the one that a step was done with, before it is read."""


class Steps:
    """Makes an engine's steps, and gives their tokens to the requests they belong to."""

    def __init__(
        self,
        scheduler: Scheduler,
        paging: Paging,
        runner: Runner,
        log: EventLog,
        eos_token_ids: Iterable[int],
        agreed: AgreedLog | None,
    ) -> None:
        """`agreed` is what several hosts have in common."""
        self.requests: dict[str, Request] = {}
        """Those that have not ended."""
        self.scheduler = scheduler
        self.kv = paging.manager
        self.log = log
        self._paging = paging
        self._runner = runner
        self._agreed = agreed
        self._eos = tuple(sorted(eos_token_ids))
        self._owner: dict[int, tuple[Request, Generation]] = {}
        self._dispatched: collections.deque[int] = collections.deque()
        self._begun_us: dict[int, int] = {}
        """When each dispatch was begun, by its number."""
        self._read: collections.deque[tuple[StepPlan, ...]] = collections.deque()
        self._last_ready_us = 0
        self._step_ids = itertools.count()
        self._admitted: set[int] = set()
        self._displaced: set[int] = set()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or a step is still to be read."""
        return self.scheduler.has_work or bool(self._dispatched)

    def accept(self, new: NewRequest) -> None:
        """Takes in a request. Raises RequestError, with nothing changed, when there is no room."""
        request, seed, words = new
        unfinished = [g for g in request.generations if not g.seq.finished]
        sequences = [generation.seq for generation in unfinished]
        try:
            for generation in unfinished:
                seq = generation.seq
                self._runner.register(
                    seq, sequence_seed(seed, seq.index), words, self._eos, generation.matcher
                )
                self.scheduler.add(seq)
        except BaseException:
            for seq in sequences:
                self._runner.forget(seq)
                self.scheduler.abort(seq.seq_id)
            raise
        request.seed = seed
        self.requests[request.request_id] = request
        for generation in unfinished:
            seq = generation.seq
            self._owner[seq.seq_id] = request, generation
            self.log.arrived(seq.seq_id, request.request_id, prompt_tokens=seq.num_prompt)

    def abort(self, request: Request) -> None:
        """Ends a request now."""
        for generation in request.generations:
            if not generation.seq.finished:
                self._finish(request, generation, Stop("abort"))
                generation.end("abort")

    def took(self, times_us: Iterable[int]) -> None:
        """What steps took that were read since, as all hosts are told."""
        for us in times_us:
            self.scheduler.took(self._read.popleft(), us)

    def close(self) -> None:
        """Lets go of requests and of the devices' memory. May be called twice."""
        self.requests.clear()
        self._dispatched.clear()
        self._paging.close()
        self._runner = None

    def advance(self, now_us: int) -> list[Request]:
        """Plans a step as of `now_us` and dispatches it, then reads what is done before it. Returns
        the requests that gained tokens or ended."""
        planned = self._dispatch(now_us)
        done = self._runner.done
        touched: dict[str, Request] = {}
        if not planned and not done:
            self._paging.wait()
        ahead = _DISPATCHES_AHEAD if planned else 0
        while done and self._runner.num_dispatches - done[0].number >= ahead:
            self._collect(self._dispatched.popleft(), done.popleft(), touched)
        return list(touched.values())

    def _dispatch(self, now_us: int) -> bool:
        """Plan and dispatch one step; False when there is nothing to run."""
        begin_us = self.log.now()
        self._paging.poll()
        plan = self.scheduler.schedule(now_us)
        self._paging.check(self.scheduler.tables)
        self._paging.carry_out()
        self._log_preempted(plan)
        if plan.empty:
            if not self._runner.busy:
                return False
            self._begin(begin_us)
            self._runner.advance()
            return True
        scheduled_us = self.log.now()
        packed = self._runner.pack(plan)
        packed_us = self.log.now()
        self._begin(packed_us)
        self._runner.dispatch(packed)
        if self._agreed is not None:
            self._agreed.saw(plan)
        self._log_entries(plan)
        step_id = next(self._step_ids)
        self.log.dispatched(
            step_id,
            part_name("step", packed.key),
            begin_us=begin_us,
            scheduled_us=scheduled_us,
            packed_us=packed_us,
            decode_rows=len(plan.decodes),
            prefill=[(chunk.seq.seq_id, chunk.num_tokens) for chunk in plan.prefills],
            padded_tokens=packed.key.num_tokens - plan.num_tokens,
            pages_used=self.kv.pool.num_used,
            pages_total=self.kv.pool.capacity,
        )
        self._dispatched.append(step_id)
        return True

    def _begin(self, us: int) -> None:
        self._begun_us[self._runner.num_dispatches + 1] = us

    def _log_preempted(self, plan: StepPlan) -> None:
        for seq in plan.preempted:
            # Whoever still waited for pages to be fetched had not yet come, or come back.
            if seq.seq_id in self._admitted and seq.seq_id not in self._displaced:
                self._displaced.add(seq.seq_id)
                self.log.preempted(seq.seq_id)

    def _log_entries(self, plan: StepPlan) -> None:
        for chunk in plan.prefills:
            seq_id = chunk.seq.seq_id
            if seq_id not in self._admitted:
                self._admitted.add(seq_id)
                cached = min(chunk.start, chunk.seq.num_prompt)  # More, if it was restored.
                self.log.admitted(seq_id, cached_tokens=cached)
            elif seq_id in self._displaced:
                self._displaced.remove(seq_id)
                self.log.resumed(seq_id)

    # Reading

    def _collect(self, step_id: int, step: DispatchedStep, touched: dict[str, Request]) -> None:
        """Read a step, and add the requests that gained tokens by it to `touched`, by id."""
        begin_us = self.log.now()
        results = self._runner.read(step)
        ready_us = self.log.now()
        # In a pipeline that is the time of one dispatch, in which each stage had a step.
        begun_us = self._begun_us.get(step.number, begin_us)
        took_us = ready_us - max(begun_us, self._last_ready_us)
        self._begun_us = {n: us for n, us in self._begun_us.items() if n > step.number}
        if self._agreed is None:
            self._time_prefill(step, took_us)
            self.scheduler.took(step.together, took_us)
        else:  # The scheduler must hear the same everywhere, so host 0's times, in the next entry.
            self._read.append(step.together)
            self._agreed.took(took_us)
            self._agreed.sampled(results.token_ids)
        self._last_ready_us = ready_us
        kept = [
            (row, chunk.seq.seq_id, token_id)
            for row, (chunk, token_id) in enumerate(zip(results.sampled, results.token_ids))
            if self.scheduler.collect(chunk, token_id)
        ]
        self.log.collected(
            step_id,
            [seq_id for _, seq_id, _ in kept],
            begin_us=begin_us,
            ready_us=ready_us,
        )
        if results.prompt_logprobs is not None:
            self._collect_prompt_logprobs(step.plan, results.prompt_logprobs)
        for row, seq_id, token_id in kept:
            request, generation = self._owner[seq_id]
            touched[request.request_id] = request
            self._append(request, generation, token_id, row, results)

    def _time_prefill(self, step: DispatchedStep, us: int) -> None:
        """Has the rates learn from a step that was large, and mostly prefill."""
        key, most = step.key, self.scheduler.config.max_prefill_tokens
        large = 2 * key.prefill_tokens >= key.num_tokens and 4 * key.prefill_tokens >= most
        if large and step.plan.prefills:
            spans = ((chunk.start, chunk.start + chunk.num_tokens) for chunk in step.plan.prefills)
            pairs = sum(causal_pairs(start, stop) for start, stop in spans)
            self.kv.rates.prefilled(key.num_tokens, pairs, us)

    def _append(
        self,
        request: Request,
        generation: Generation,
        token_id: int,
        row: int,
        results: StepResults,
    ) -> None:
        if token_id == NO_TOKEN:
            generation.seq.output_token_ids.pop()
            self._fail(request, generation, "the model's logits left no token to sample")
            return
        scores = None
        if results.logprobs is not None and generation.seq.params.logprobs is not None:
            scores = _scores(results.logprobs, row, generation.seq.params.logprobs)
        stop = generation.append(token_id, scores)
        if stop is not None:
            self._finish(request, generation, stop)
        elif generation.error is not None:
            self._fail(request, generation, generation.error)

    def _collect_prompt_logprobs(self, plan: StepPlan, scored: TokenLogprobs) -> None:
        first = 0
        for chunk in plan.prefills:
            owner = self._owner.get(chunk.seq.seq_id)
            if owner is not None and owner[0].params.prompt_logprobs is not None:
                self._add_prompt_scores(owner[0], chunk, scored, first)
            first += chunk.num_tokens

    def _add_prompt_scores(
        self, request: Request, chunk: Chunk, scored: TokenLogprobs, first: int
    ) -> None:
        """The hidden state of a token scores the one after it."""
        position = chunk.start + 1
        count = min(chunk.num_tokens, len(request.prompt_token_ids) - position)
        wanted = request.params.prompt_logprobs
        request.add_prompt_scores(
            position, [_scores(scored, first + i, wanted) for i in range(max(0, count))]
        )

    def _finish(self, request: Request, generation: Generation, stop: Stop) -> None:
        seq = generation.seq
        self.scheduler.finish(seq, stop.reason, stop.stop_reason)
        self.log.finished(seq.seq_id, stop.reason)
        self._release(request, seq)

    def _fail(self, request: Request, generation: Generation, error: str) -> None:
        seq = generation.seq
        self.scheduler.finish(seq, "error")
        generation.end("error")
        request.error = error
        self.log.failed(seq.seq_id, error)
        self._release(request, seq)

    def _release(self, request: Request, seq: Sequence) -> None:
        self._runner.forget(seq)
        self._admitted.discard(seq.seq_id)
        self._displaced.discard(seq.seq_id)
        del self._owner[seq.seq_id]
        if request.finished:
            del self.requests[request.request_id]


def _scores(scored: TokenLogprobs, row: int, count: int) -> TokenScores:
    ids, logprobs = scored.top_ids[row, :count], scored.top_logprobs[row, :count]
    return TokenScores(
        logprob=float(scored.logprobs[row]),
        rank=int(scored.ranks[row]),
        top=tuple(zip(ids.tolist(), logprobs.tolist())),
    )
