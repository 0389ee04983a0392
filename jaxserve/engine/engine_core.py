"""The engine loop: schedule, execute, update; a step is dispatched before the previous is read.

While the devices compute a step, the host schedules, packs and dispatches the next one, whose
input tokens are still on the devices, and then reads the older step. So a stop condition is seen
one step late, and the token sampled in the meantime is dropped.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from jaxserve.core.commands import Abort, AddRequest, Command, ResetPrefixCache, SetPriority
from jaxserve.core.events import EventLog
from jaxserve.core.in_flight import DispatchedStep, PackedStep, StepResults
from jaxserve.core.sampling_params import sequence_seed
from jaxserve.core.sequence import Sequence
from jaxserve.core.step_plan import StepPlan
from jaxserve.engine.input_processor import InputProcessor
from jaxserve.engine.output_processor import Ended, OutputProcessor
from jaxserve.engine.request import Request, SequenceOutput, Stop
from jaxserve.kv.manager import KVManager
from jaxserve.kv.page_table import PageTable
from jaxserve.kv.rates import causal_pairs
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.structured.grammar import Grammar
from jaxserve.structured.matcher import Matcher

_STEPS_AHEAD = 1
"""Dispatches between the one that completes a step and the reading of that step."""


class Executor(Protocol):
    """Runs step plans: on devices (`runtime.runner.Runner`), or on a virtual clock
    (`simulator.executor.SimulatedExecutor`)."""

    in_flight: collections.deque[DispatchedStep]
    """Steps completed by a dispatch and not yet read, oldest first."""
    num_dispatches: int

    @property
    def busy(self) -> bool:
        """Whether the pipeline holds a step that needs more dispatches to complete."""

    def register(
        self,
        seq: Sequence,
        seed: int,
        bad_word_ids: SequenceOf[SequenceOf[int]],
        eos_token_ids: tuple[int, ...],
        matcher: Matcher | None,
    ) -> None:
        """Registers a sequence before its first step. Raises RequestError for bad `bad_words`."""

    def forget(self, seq: Sequence) -> None: ...

    def pack(self, plan: StepPlan, step_id: int) -> PackedStep:
        """Builds a plan's inputs. Raises ProgramMissError when no compiled program fits it."""

    def dispatch(self, packed: PackedStep, begun_us: int) -> None:
        """Starts a step asynchronously."""

    def advance(self, begun_us: int) -> None:
        """Advances the pipeline by one stage with a bubble at its entry."""

    def read(self, step: DispatchedStep) -> StepResults:
        """Waits for a step's results."""


class Transfers(Protocol):
    """KV pages and their transfers between tiers (`kv.page_transfers.PageTransfers`)."""

    manager: KVManager

    def poll(self) -> None:
        """Processes completed transfers. Called before a step is scheduled."""

    def carry_out(self) -> None:
        """Dispatches the page operations of the step just scheduled."""

    def check(self, tables: Mapping[int, PageTable]) -> None:
        """In debug mode, checks the manager's invariants."""

    def wait(self) -> None:
        """Waits briefly for a transfer when the engine is otherwise idle."""

    def close(self) -> None: ...


class EngineCore:
    """Applies commands, runs steps, and appends their tokens to requests."""

    def __init__(
        self,
        scheduler: Scheduler,
        transfers: Transfers,
        executor: Executor,
        input_processor: InputProcessor,
        log: EventLog,
        eos_token_ids: Iterable[int],
    ) -> None:
        self.scheduler = scheduler
        self.kv = transfers.manager
        self.log = log
        self._transfers = transfers
        self._executor = executor
        self._input = input_processor
        self._outputs = OutputProcessor()
        self._eos = tuple(sorted(eos_token_ids))
        self._last_ready_us = 0
        self._step_ids = itertools.count()

    leads = True
    """Whether this host's commands count: always, unless it is one of several."""
    ended = False
    """Whether host 0 of several has closed its engine."""

    @property
    def requests(self) -> dict[str, Request]:
        """Unfinished requests, by id."""
        return self._outputs.requests

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or a dispatched step is not yet read."""
        executor = self._executor
        if executor is None:  # closed
            return False
        return self.scheduler.has_work or bool(executor.in_flight) or executor.busy

    def apply(self, command: Command, grammar: Grammar | None = None) -> Request | None:
        """Applies a command. Returns its request, None if that has finished. `grammar`: the
        compiled grammar of a request to add, if there is one.

        Raises RequestError, with no state changed, when a request cannot be added.
        """
        match command:
            case AddRequest():
                request = self._input.build(command, grammar)
                self.accept(request)
                return request
            case Abort(request_id):
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
                return None

    def accept(self, request: Request) -> None:
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
        for seq in added:
            self.log.arrived(
                seq.seq_id,
                request.request_id,
                prompt_tokens=seq.num_prompt,
                max_tokens=seq.params.max_tokens,
                index=seq.index,
                n=seq.params.n,
            )

    def step(self) -> list[Request]:
        """Schedules and dispatches a step, then reads the previous one. Returns the requests that
        gained tokens or finished."""
        return self._step(self.log.now())

    def _step(self, now_us: int) -> list[Request]:
        planned = self._dispatch(now_us)
        in_flight = self._executor.in_flight
        if not planned and not in_flight:
            self._transfers.wait()
        ahead = _STEPS_AHEAD if planned else 0
        touched: dict[str, Request] = {}
        while in_flight and self._executor.num_dispatches - in_flight[0].number >= ahead:
            for request in self._update(in_flight.popleft()):
                touched[request.request_id] = request
        return list(touched.values())

    def close(self, failed: bool = False) -> None:
        """Aborts all requests and frees the devices' memory. Can be called twice.

        `failed`: a step was interrupted, so state may be inconsistent.
        """
        try:
            for request in list(self.requests.values()):
                self._abort(request)
        finally:  # After a step failed midway, aborting a request may raise.
            self.requests.clear()
            self._transfers.close()
            self._executor = None

    # Schedule, execute

    def _dispatch(self, now_us: int) -> bool:
        """Schedules and dispatches one step; False if there was nothing to run."""
        begin_us = self.log.now()
        self._transfers.poll()
        plan = self.scheduler.schedule(now_us)
        self._transfers.check(self.scheduler.tables)
        self._transfers.carry_out()
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
        self._planned(plan)
        for chunk in plan.admitted:
            # A restored sequence may have more cached tokens than its prompt.
            cached = min(chunk.start, chunk.seq.num_prompt)
            self.log.admitted(chunk.seq.seq_id, cached_tokens=cached)
        for seq in plan.resumed:
            self.log.resumed(seq.seq_id)
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
        )
        return True

    # Update

    def _update(self, step: DispatchedStep) -> list[Request]:
        """Reads a step; returns the requests that gained tokens."""
        begin_us = self.log.now()
        results = self._executor.read(step)
        ready_us = self.log.now()
        # With pipeline stages, this is the time of one dispatch, which ran a step on each stage.
        begun_us = begin_us if step.begun_us is None else step.begun_us
        self._measured(step, results, ready_us - max(begun_us, self._last_ready_us))
        self._last_ready_us = ready_us
        self._outputs.add_prompt_logprobs(step.plan, results)
        gained: collections.Counter[int] = collections.Counter()
        touched: dict[str, Request] = {}
        ended: dict[int, Ended] = {}
        for place in range(max(map(len, results.token_ids), default=0)):
            tokens = [
                (row * results.width + place, chunk.seq.seq_id, token_ids[place])
                for row, (chunk, token_ids) in enumerate(zip(results.sampled, results.token_ids))
                if place < len(token_ids)
                and chunk.seq.seq_id not in ended  # Tokens after a stop are dropped.
                and self.scheduler.collect(chunk, token_ids[place], place)
            ]
            gained.update(seq_id for _, seq_id, _ in tokens)
            requests, stopped = self._outputs.process(results, tokens)
            touched |= {request.request_id: request for request in requests}
            ended |= {end.output.seq.seq_id: end for end in stopped}
        self.log.collected(
            step.step_id,
            gained,
            gained.values() if results.width > 1 else None,
            drafts=[
                (num_drafts, len(token_ids) - 1)
                for chunk, num_drafts, token_ids in zip(
                    results.sampled, results.num_drafts, results.token_ids
                )
                if num_drafts and chunk.seq.seq_id in gained
            ],
            begin_us=begin_us,
            ready_us=ready_us,
        )
        for end in ended.values():
            self._end(end)
        return list(touched.values())

    def _planned(self, plan: StepPlan) -> None:
        """Called after a step was dispatched."""

    def _measured(self, step: DispatchedStep, results: StepResults, us: int) -> None:
        """Called after a step was read: its dispatch time `us` updates the step time model and the
        prefill rate of swap decisions."""
        self.scheduler.observe_step_time(step.together, us)
        key, most = step.key, self.scheduler.config.max_prefill_tokens
        large = 2 * key.prefill_tokens >= key.num_tokens and 4 * key.prefill_tokens >= most
        if large and step.plan.prefills:
            spans = ((chunk.start, chunk.start + chunk.num_tokens) for chunk in step.plan.prefills)
            pairs = sum(causal_pairs(start, stop) for start, stop in spans)
            self.kv.rates.prefilled(key.num_tokens, pairs, us)

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
