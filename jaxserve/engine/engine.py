"""The engine: requests in, steps made, outputs out; on one host, or in step with others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

import jax

from jaxserve.config import EngineConfig
from jaxserve.engine.agreed_log import Addition, AgreedLog
from jaxserve.engine.checkpoint import check_writable
from jaxserve.engine.elastic import Checkpoints
from jaxserve.engine.events import EventLog, monotonic_us
from jaxserve.engine.intake import Intake, NewRequest, check_priority
from jaxserve.engine.interrupts import interrupts_held
from jaxserve.engine.kv_metrics import kv_metrics
from jaxserve.engine.metrics import Metric, Metrics
from jaxserve.engine.prompts import Prompt, TokenizedPrompt
from jaxserve.engine.request import Request
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.shared_prefix import SharedPrefix
from jaxserve.engine.steps import Steps
from jaxserve.errors import CheckpointError, EngineClosedError, JaxserveError, RequestError
from jaxserve.outputs import RequestMetrics, RequestOutput
from jaxserve.runtime.cpu_threads import make_room_for_collectives
from jaxserve.runtime.hosts import Hosts
from jaxserve.runtime.paging import Paging
from jaxserve.runtime.runner import Runner
from jaxserve.runtime.startup import EnginePlan, Progress, no_progress, start
from jaxserve.sampling_params import SamplingParams
from jaxserve.structured.grammar import Grammar
from jaxserve.text import Tokenizer


class Engine:
    """Serves requests on one model. Not thread-safe: one caller adds, steps and aborts."""

    def __init__(
        self,
        plan: EnginePlan,
        tokenizer: Tokenizer,
        runner: Runner,
        log: EventLog,
        metrics: Metrics,
        hosts: Hosts | None = None,
    ) -> None:
        """`hosts` are those of a job of several, each of which has such an engine."""
        config = plan.config
        self.plan = plan
        self.tokenizer = tokenizer
        self.log = log
        self.metrics = metrics
        self._paging = Paging(plan, runner, log)
        self.kv = self._paging.manager
        self.scheduler = Scheduler(plan.scheduler, self.kv)
        self._closed: str | None = None
        self._hosts = hosts
        self._agreed = None if hosts is None else AgreedLog(hosts)
        model = plan.geometry.model
        self.eos_token_ids = frozenset((*model.eos_token_ids, *tokenizer.eos_token_ids))
        self._runner = runner
        self._steps = Steps(
            self.scheduler, self._paging, runner, log, self.eos_token_ids, self._agreed
        )
        self._requests = self._steps.requests
        self._intake = Intake(config, tokenizer, model.vocab_size, self.eos_token_ids, log.now)
        self._checkpoints = Checkpoints(plan, tokenizer, self._intake, self.scheduler, self._paging)

    @classmethod
    def load(
        cls, config: EngineConfig, *, progress: Progress = no_progress, keep_events: bool = False
    ) -> Self:
        """Open, compile and load; ready to serve when it returns. `keep_events` keeps the whole
        event log for a trace file. Raises ModelError, ConfigError or MemoryPlanError."""
        metrics = Metrics()
        log = EventLog(metrics.fold, clock=monotonic_us, keep_all=keep_events)
        make_room_for_collectives()
        hosts = Hosts() if jax.process_count() > 1 else None
        try:
            plan, tokenizer, runner = start(config, log, progress, hosts)
            return cls(plan, tokenizer, runner, log, metrics, hosts)
        except BaseException:
            if hosts is not None:
                hosts.close()
            raise

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or a step is still to be read."""
        return self._steps.has_work

    def add(
        self,
        request_id: str,
        prompt: Prompt | TokenizedPrompt,
        params: SamplingParams,
        priority: int | None = None,
        tenant: str | None = None,
        shared_prefix: SharedPrefix | None = None,
        grammar: Grammar | None = None,
        cache_salt: str | None = None,
    ) -> Request:
        """Accept a request. Text is tokenized with the model's special tokens.

        Requests of different tenants share no cached prefix, and under `fair_share` the engine.
        Those with different `cache_salt`s share no cached prefix either. `shared_prefix` is what
        the prompt is known to share with those of other requests.
        `grammar` is what `prepare` has made of these params; without it, it is compiled now.

        Raises RequestError for anything wrong with it, before anything is changed, and
        EngineClosedError on a closed engine.
        """
        self._check_open()
        if request_id in self._requests:
            raise RequestError(f"request_id {request_id!r} is in use by an unfinished request.")
        if grammar is None:
            grammar = self.prepare(params)
        wishes = priority, tenant, shared_prefix, grammar, cache_salt
        new = self._intake.make(request_id, prompt, params, *wishes)
        with interrupts_held():
            self._steps.accept(new)
            self._note_addition(new, priority, tenant, shared_prefix)
        return new.request

    def prepare(self, params: SamplingParams) -> Grammar | None:
        """The compiled grammar of `params.structured_outputs`, if it has one, for `add`: what takes
        time, and can be done by any thread while the engine runs.

        Raises RequestError for one that is invalid, too large or too slow, or when too many wait.
        """
        preparation = self.preparation(params)
        return None if preparation is None else preparation.result()

    def preparation(self, params: SamplingParams) -> Future[Grammar] | None:
        """What `prepare` returns or raises, for those who have no thread to wait with. May be
        cancelled."""
        return self._intake.grammar(params)

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """A prompt's token ids, as `add` takes them. Raises RequestError for a bad prompt."""
        return self._intake.tokenize(prompt)

    def abort(self, request_id: str) -> Request | None:
        """End a request now; what it has is its output. None if it has already ended."""
        with interrupts_held():
            request = self._requests.get(request_id)
            if request is not None:
                self._note("abort", request_id)
                self._steps.abort(request)
        return request

    def set_priority(self, request_id: str, priority: int) -> bool:
        """Change the priority of a request, lower running first; False if it has ended.

        Raises RequestError unless it is an integer.
        """
        check_priority(priority)
        with interrupts_held():
            request = self._requests.get(request_id)
            if request is not None:
                self._note("set_priority", request_id, priority)
                self._set_priority(request, priority)
        return request is not None

    def _set_priority(self, request: Request, priority: int) -> None:
        for generation in request.generations:
            self.scheduler.set_priority(generation.seq.seq_id, priority)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Running requests keep the pages they have."""
        self._note("reset_prefix_cache")
        self.kv.reset()

    @property
    def leads(self) -> bool:
        """Whether this is the only host, or the first of several, whose commands count."""
        return self._agreed is None or self._agreed.leads

    def follow(self) -> None:
        """Make every step that host 0 makes, until it closes its engine: what hosts do that are
        given no requests themselves. Raises DistributedError, or as `step` does."""
        while self._closed is None:
            self._step(wait=True)

    def step(self) -> list[Request]:
        """Plan and dispatch a step, then read the oldest one. Returns the requests that gained
        tokens or ended; empty while the pipeline fills.

        An error of the device closes the engine and is raised. Ctrl-C waits for the step's end.
        """
        return self._step(wait=False)

    def _step(self, wait: bool) -> list[Request]:
        self._check_open()
        touched: list[Request] | None = None
        try:
            with interrupts_held():
                now_us = self._agree(wait)
                with self._step_watched():
                    touched = [] if now_us is None else self._steps.advance(now_us)
        except BaseException as error:
            if touched is not None:
                raise
            # The step was cut in two, and the device's state with it.
            self._closed = f"the engine stopped: {type(error).__name__}: {error}"
            if self._hosts is not None and not isinstance(error, JaxserveError):
                raise self._hosts.blame(error) or error from error
            raise
        return touched

    def output(self, request: Request) -> RequestOutput:
        """What a request has by now, with its times."""
        sequences = [generation.seq for generation in request.generations]
        served = [seq.seq_id for seq in sequences if seq.seq_id in self.metrics]
        if not served:  # It had ended before it was restored.
            return request.output(RequestMetrics(arrival_us=sequences[0].arrival_us))
        return request.output(self.metrics.request(served))

    def snapshot(self) -> dict[str, Metric]:
        """All metrics, by the names they are exported under."""
        return self.metrics.snapshot() | kv_metrics(self.kv)

    def checkpoint(
        self,
        directory: str | Path,
        with_kv: bool = True,
        deadline_s: float | None = None,
        ended: Iterable[Request] = (),
    ) -> None:
        """Write every unfinished request to a directory, for `restore` in another process; and of
        those that have `ended`, such whose outputs nobody has seen yet. The engine can go on.

        The requests are safe first. `with_kv` then adds their KV and that of the prefix cache on
        the device, what is needed most first, as far as it goes until `deadline_s` seconds from
        now. What is not there will be computed again.

        Raises CheckpointError when the directory cannot be written, or is not a checkpoint's, or
        when the engine is one of several hosts'.
        """
        self._check_open()
        self._check_one_host()
        requests = {request.request_id: request for request in ended} | self._requests
        with interrupts_held():
            self._checkpoints.write(
                directory, requests.values(), self.log.now(), with_kv, deadline_s
            )

    def check_checkpoint(self, directory: str | Path) -> None:
        """Raises CheckpointError, now and not when it is needed, for a `directory` that
        `checkpoint` would refuse."""
        self._check_one_host()
        check_writable(directory)

    def restore(self, directory: str | Path) -> list[Request]:
        """Take up the requests of a checkpoint, in the order they arrived in; some may have ended.

        They go on where they were, on a mesh of any shape, with pages of any size, and have all
        their deltas before them. KV of another dtype or quantization is computed again.

        Raises CheckpointError, before anything is changed, when the checkpoint is damaged, newer,
        of another model, or has requests for which this engine has no room or whose ids are in use.
        """
        self._check_open()
        self._check_one_host()
        taken_up = self._checkpoints.read(directory, self._requests, self.log.now())
        with interrupts_held():
            for new in taken_up.requests:
                if not new.request.finished:
                    self._steps.accept(new)
            self._checkpoints.restore_kv(taken_up)
        return [new.request for new in taken_up.requests]

    def close(self) -> None:
        """Abort what runs and free the device's memory. May be called twice."""
        try:
            if self._agreed is not None:
                self._agreed.end(checked=self._closed is None)
            for request in list(self._requests.values()):
                self._steps.abort(request)
        finally:  # A step that failed half way may have left requests that cannot be aborted.
            self._steps.close()
            self._runner = None
            if self._hosts is not None:
                self._hosts.close()
            self._closed = self._closed or "the engine was closed"

    def chat_prompt(
        self,
        messages: SequenceOf[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **template_variables: Any,
    ) -> list[int]:
        """Token ids of a conversation laid out by the model's chat template."""
        text = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt, **template_variables
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """What the model's generation_config.json recommends, with `overrides`."""
        defaults = dict(self.plan.geometry.model.default_sampling)
        return SamplingParams.from_defaults(defaults, **overrides)

    # Agreement with other hosts

    def _step_watched(self) -> contextlib.AbstractContextManager[None]:
        """Ends the process when a step that needs other hosts takes too long."""
        return contextlib.nullcontext() if self._hosts is None else self._hosts.bounded()

    def _agree(self, wait: bool) -> int | None:
        """Host 0's clock at the next step, when all its commands before that step are carried out;
        None when it makes no more steps. One host agrees with itself."""
        now_us = self.log.now()
        if self._agreed is None:
            return now_us
        entry, commands = self._agreed.agree(now_us, wait)
        if self._agreed.ended:
            self._closed = "host 0 has closed its engine"
            return None
        arrivals_us = iter(entry.arrivals_us)
        for command, given in commands:
            self._carry_out(command, given, arrivals_us)
        self._steps.took(entry.took_us)
        return entry.now_us

    def _carry_out(self, command: list[Any], given: bool, arrivals_us: Iterator[int]) -> None:
        """A command of host 0, which has done it already, as this host has if it was given it."""
        match command:
            case ["add", fields]:
                if not given:
                    added = Addition.from_json(fields)
                    prefix = self._agreed.prefix_of(added.prefix)
                    self._steps.accept(self._intake.make_again(added, prefix))
                self._set_arrival(fields["request_id"], next(arrivals_us))
            case _ if given:
                pass
            case ["abort", request_id]:
                self._steps.abort(self._requests[request_id])
            case ["set_priority", request_id, priority]:
                self._set_priority(self._requests[request_id], priority)
            case ["reset_prefix_cache"]:
                self.kv.reset()

    def _set_arrival(self, request_id: str, arrival_us: int) -> None:
        """Has a request have come when it came to host 0, unless it has ended already."""
        request = self._requests.get(request_id)
        if request is not None and not self.leads:
            for generation in request.generations:
                generation.seq.arrival_us = arrival_us
                self.scheduler.set_priority(generation.seq.seq_id, generation.seq.priority)

    def _note(self, *command: Any) -> None:
        """Has all hosts know of a command."""
        if self._agreed is not None:
            self._agreed.note(list(command))

    def _note_addition(
        self,
        new: NewRequest,
        priority: int | None,
        tenant: str | None,
        shared_prefix: SharedPrefix | None,
    ) -> None:
        if self._agreed is None:
            return
        request, first = new.request, new.request.generations[0].seq
        added = Addition(
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            request.params,
            priority,
            tenant,
            new.seed,
            first.seq_id,
            self._agreed.number_of(shared_prefix),
            first.cache_salt,
        )
        self._agreed.note(added.to_json(), first.arrival_us)

    def _check_one_host(self) -> None:
        if self._hosts is not None:
            raise CheckpointError(
                f"a checkpoint is of one process, and this engine is one of "
                f"{jax.process_count()} hosts'; give all devices to one process."
            )

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError(f"{self._closed}; make a new one.")
