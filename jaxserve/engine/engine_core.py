"""The engine loop: schedule, execute, update; a step is dispatched before the previous is read.

While the devices compute a step, the host schedules, packs and dispatches the next one, whose
input tokens are still on the devices, and then reads the older step. So a stop condition is seen
one step late, and the token sampled in the meantime is dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from jaxserve.core.commands import (
    Abort,
    AddRequest,
    Command,
    ResetPrefixCache,
    SetPriority,
)
from jaxserve.core.errors import EngineAsleepError
from jaxserve.core.events import EventLog, VerifiedDrafts
from jaxserve.core.requests.sampling_params import sequence_seed
from jaxserve.core.sequence import Sequence
from jaxserve.core.steps.plan import StepPlan
from jaxserve.core.steps.results import NO_TOKEN, DispatchedStep, StepResults
from jaxserve.core.steps.work import causal_pairs
from jaxserve.engine.executor import AdapterLoader, Executor, StepObserver
from jaxserve.engine.input_processor import InputProcessor
from jaxserve.engine.local_commands import (
    LoadAdapter,
    LocalCommand,
    Resume,
    Retract,
    Sleep,
    UnloadAdapter,
    UseWeights,
    WakeUp,
)
from jaxserve.engine.output_processor import Ended, OutputProcessor
from jaxserve.engine.request import Request, SequenceOutput, Stop
from jaxserve.kv.kv_executor import KVExecutor
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.structured.grammar import Grammar


class MeasuredTimes:
    """Updates step times and the rate of prefills by the steps of this process."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def dispatched(self, plan: StepPlan) -> None:
        """Does nothing."""

    def read(self, step: DispatchedStep, results: StepResults, us: int) -> None:
        if not step.together:
            return
        self._scheduler.observe_step_time(step.together, us)
        key, most = step.key, self._scheduler.config.max_prefill_tokens
        large = 2 * key.prefill_tokens >= key.num_tokens and 4 * key.prefill_tokens >= most
        if large and step.plan.prefills:
            spans = ((chunk.start, chunk.start + chunk.num_tokens) for chunk in step.plan.prefills)
            pairs = sum(causal_pairs(start, stop) for start, stop in spans)
            self._scheduler.kv.rates.prefilled(key.num_tokens, pairs, us)


class EngineCore:
    """Applies commands, runs steps, and appends their tokens to requests."""

    def __init__(
        self,
        scheduler: Scheduler,
        kv_executor: KVExecutor,
        executor: Executor,
        input_processor: InputProcessor,
        log: EventLog,
        eos_token_ids: Iterable[int],
        adapters: AdapterLoader | None = None,
    ) -> None:
        """`adapters`: if requests may have any."""
        self.scheduler = scheduler
        self.kv = kv_executor.manager
        self.log = log
        self.kv_executor = kv_executor
        self._executor = executor
        self._input = input_processor
        self._adapters = adapters
        self.observer: StepObserver = MeasuredTimes(scheduler)
        self._outputs = OutputProcessor()
        self._eos = tuple(sorted(eos_token_ids))
        self._last_ready_us = 0
        self._step_ids = itertools.count()
        self._touched: dict[str, Request] = {}
        self.weights_version = 0
        self.asleep = False
        self.num_page_changes = 0
        """How often the content or the owners of pages may have changed."""

    @property
    def requests(self) -> dict[str, Request]:
        """Unfinished requests, by id."""
        return self._outputs.requests

    def report_again(self, touched: Iterable[Request]) -> None:
        """Has the next step return these requests, too."""
        self._touched |= {request.request_id: request for request in touched}

    def note_page_change(self) -> None:
        """Notes that the content or the owners of pages may change."""
        self.num_page_changes += 1

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or a dispatched step not yet read, and can
        continue."""
        executor = self._executor
        if executor is None:  # closed
            return False
        if self._touched or self.asleep:
            return bool(self._touched)
        return self.scheduler.has_work or bool(executor.in_flight) or executor.busy

    def check_awake(self) -> None:
        """Raises EngineAsleepError on a sleeping engine."""
        if self.asleep:
            raise EngineAsleepError("the engine sleeps; call wake_up first.")

    def apply(
        self, command: Command | LocalCommand, grammar: Grammar | None = None
    ) -> Request | None:
        """Applies a command. Returns its request, None if that has finished. `grammar`: the
        compiled grammar of a request to add, if there is one.

        Raises RequestError, with no state changed, when a request cannot be added, and as
        `AdapterSlots` for commands about adapters.
        """
        match command:
            case AddRequest():
                request = self._input.build(command, grammar)
                self._accept(request)
                return request
            case Resume(request):
                self._accept(request)
                return request
            case Abort(request_id):
                self.note_page_change()
                request = self.requests.get(request_id)
                if request is not None:
                    self._abort(request)
                return request
            case SetPriority(request_id, priority):
                request = self.requests.get(request_id)
                if request is not None:
                    for output in request.sequence_outputs:
                        self.scheduler.set_priority(output.seq.seq_id, priority)
                return request
            case ResetPrefixCache():
                self.kv.reset()
            case Retract():
                self._retract()
            case UseWeights():
                self.weights_version += 1
                for request in self.requests.values():
                    for output in request.unfinished:
                        output.use_weights(self.weights_version)
            case Sleep():
                if not self.asleep:
                    self._retract()
                self.asleep = True
            case WakeUp():
                self.asleep = False
            case LoadAdapter(adapter, in_place, pinned):
                self._adapters.load(adapter, in_place=in_place, pinned=pinned)
            case UnloadAdapter(name):
                self._adapters.remove(name)
        return None

    def _accept(self, request: Request) -> None:
        """Queues a request. Raises RequestError, with no state changed, when it cannot run."""
        added: list[Sequence] = []
        try:
            for output in request.unfinished:
                seq = output.seq
                added.append(seq)
                self._executor.register(
                    seq,
                    sequence_seed(request.seed, seq.index),
                    request.bad_word_ids,
                    self._eos,
                    output.matcher,
                )
                self.scheduler.add(seq)
        except BaseException:
            for seq in added:
                self._executor.forget(seq)
                self.scheduler.abort(seq.seq_id)
            raise
        self._outputs.add(request)
        for output in request.sequence_outputs:
            output.use_weights(self.weights_version)
        for seq in added:
            self.log.arrived(
                seq.seq_id,
                request.request_id,
                prompt_tokens=seq.num_prompt,
                max_tokens=seq.params.max_tokens,
                index=seq.index,
                n=seq.params.n,
            )

    def _retract(self) -> None:
        self.note_page_change()
        executor = self._executor
        while executor.busy:
            executor.advance(self.log.now())
        while executor.in_flight:
            self._touched |= self._update(executor.in_flight.popleft())
        self.scheduler.preempt_all()
        self.kv.reset()
        self.kv_executor.poll()
        self.kv_executor.carry_out()

    def step(self, now_us: int | None = None) -> list[Request]:
        """Schedules and dispatches a step, then reads the previous one. Returns the requests that
        gained tokens or finished. `now_us`: the time that the scheduler is given, now if None."""
        if now_us is None:
            now_us = self.log.now()
        self.note_page_change()
        touched, self._touched = self._touched, {}
        if self.asleep:
            return list(touched.values())
        planned = self._dispatch(now_us)
        in_flight = self._executor.in_flight
        if not planned and not in_flight:
            self.kv_executor.wait()
        ahead = self._executor.steps_ahead if planned else 0
        while in_flight and self._executor.num_dispatches - in_flight[0].number >= ahead:
            touched |= self._update(in_flight.popleft())
        return list(touched.values())

    def close(self, failed: bool = False) -> None:
        """Aborts all requests and frees the devices' memory. Can be called twice.

        `failed`: a step was interrupted, so state may be inconsistent.
        """
        self.note_page_change()
        try:
            for request in list(self.requests.values()):
                self._abort(request)
        finally:  # After a step failed midway, aborting a request may raise.
            self.requests.clear()
            self.kv_executor.close()
            self._executor = None

    # Schedule, execute

    def _dispatch(self, now_us: int) -> bool:
        """Schedules and dispatches one step; False if there was nothing to run."""
        begin_us = self.log.now()
        self.kv_executor.poll()
        plan = self.scheduler.schedule(now_us)
        self.kv_executor.check(self.scheduler.tables)
        self.kv_executor.carry_out()
        for seq in plan.preempted:
            self.log.preempted(seq.seq_id)
        if plan.empty:
            if not self._executor.busy:
                return False
            self._executor.advance(begin_us)
            return True
        scheduled_us = self.log.now()
        packed = self._executor.pack(plan, next(self._step_ids))
        packed_us = self.log.now()
        self._executor.dispatch(packed, packed_us)
        self.observer.dispatched(plan)
        for chunk in plan.admitted:
            # A restored sequence may have more cached tokens than its prompt.
            cached = min(chunk.start, chunk.seq.num_prompt)
            self.log.admitted(chunk.seq.seq_id, cached_tokens=cached)
        for seq in plan.resumed:
            self.log.resumed(seq.seq_id)
        prefix_bytes, alone_bytes = self.scheduler.prefix_kv_bytes(plan)
        self.log.dispatched(
            packed.step_id,
            f"step-{packed.key}",
            begin_us=begin_us,
            scheduled_us=scheduled_us,
            packed_us=packed_us,
            decode_rows=len(plan.decodes),
            prefill=[(chunk.seq.seq_id, chunk.num_tokens) for chunk in plan.prefills],
            padded_tokens=packed.key.num_tokens - plan.num_tokens,
            pages_used=self.kv.pool.num_used,
            pages_total=self.kv.pool.capacity,
            prefix_kv_bytes=prefix_bytes,
            prefix_kv_bytes_alone=alone_bytes,
        )
        return True

    # Update

    def _update(self, step: DispatchedStep) -> dict[str, Request]:
        """Reads a step; returns the requests that gained tokens, or ended, by id."""
        begin_us = self.log.now()
        results = self._executor.read(step)
        ready_us = self.log.now()
        # With pipeline stages, this is the time of one dispatch, which ran a step on each stage.
        begun_us = begin_us if step.begun_us is None else step.begun_us
        self.observer.read(step, results, ready_us - max(begun_us, self._last_ready_us))
        self._last_ready_us = ready_us
        self._outputs.add_prompt_logprobs(step.plan, results)
        ended = self._outputs.pool(step.plan, results)
        touched = {end.request.request_id: end.request for end in ended}
        gained: list[int] = []
        counts: list[int] = []
        drafts: list[VerifiedDrafts] = []
        trees = step.draft_trees() if self.log.keeps_all else []
        for row, chunk in enumerate(results.sampled):
            seq = chunk.seq
            if seq.pooling is not None:
                continue
            token_ids = results.token_ids[row]
            if chunk.num_drafts and token_ids[0] != NO_TOKEN:
                num_drafts = results.num_drafts[row]
                self.scheduler.observe_drafts(chunk, num_drafts, len(token_ids) - 1)
            count = 0
            for place, token_id in enumerate(token_ids):
                if not self.scheduler.collect(chunk, token_id, place):
                    break
                count += 1
                request, end = self._outputs.append(seq, token_id, results, row, place)
                touched[request.request_id] = request
                if end is not None:
                    ended.append(end)
                    break  # Tokens after a stop are dropped.
            if count:
                gained.append(seq.seq_id)
                counts.append(count)
                if num_drafts := results.num_drafts[row]:
                    counted = seq.seq_id, num_drafts, len(token_ids) - 1
                    drafts.append(VerifiedDrafts(*counted, trees[row] if trees else None))
        self.log.collected(
            step.step_id,
            gained,
            counts if results.width > 1 else None,
            drafts=drafts,
            begin_us=begin_us,
            ready_us=ready_us,
            late=results.late,
        )
        for end in ended:
            self._end(end)
        return touched

    def _abort(self, request: Request) -> None:
        for output in request.unfinished:
            self._finish(request, output, Stop("abort"))
            output.end("abort")

    def _end(self, ended: Ended) -> None:
        request, output, stop, error = ended
        if stop is not None:
            self._finish(request, output, stop)
            return
        seq = output.seq
        self.scheduler.finish(seq, "error")
        output.end("error")
        request.error = error
        self.log.failed(seq.seq_id, error)
        self._release(request, output)

    def _finish(self, request: Request, output: SequenceOutput, stop: Stop) -> None:
        self.scheduler.finish(output.seq, stop.reason, stop.stop_reason)
        self.log.finished(output.seq.seq_id, stop.reason)
        self._release(request, output)

    def _release(self, request: Request, output: SequenceOutput) -> None:
        self._executor.forget(output.seq)
        self._outputs.remove(request, output)
