"""The engine: takes requests, runs steps, returns outputs; on one host or several in lockstep."""

from __future__ import annotations

import logging
import os
import weakref
from concurrent.futures import Future
from typing import Any, Self

import jax

from jaxserve.core.commands import Abort, ResetPrefixCache, SetPriority
from jaxserve.core.errors import ConfigError, EngineClosedError, RequestError
from jaxserve.core.events import EventLog, Record, monotonic_us
from jaxserve.core.process.signals import interrupts_held
from jaxserve.core.requests.lora import LoadedAdapter, LoRARequest
from jaxserve.core.requests.outputs import RequestMetrics, RequestOutput
from jaxserve.core.requests.pooling import PoolingParams
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.core.sequence import SharedPrefix
from jaxserve.core.settings.config import EngineConfig
from jaxserve.engine.engine_core import EngineCore
from jaxserve.engine.engine_weights import EngineWeights
from jaxserve.engine.input_processor import InputProcessor, check_priority
from jaxserve.engine.local_commands import LoadAdapter, UnloadAdapter
from jaxserve.engine.prompts import Prompt, TokenizedPrompt
from jaxserve.engine.replication.core import ReplicatedCore
from jaxserve.engine.request import Request
from jaxserve.engine.snapshot.access import EngineAccess
from jaxserve.engine.snapshot.compatibility import SnapshotFacts
from jaxserve.engine.snapshot.migration import Migration
from jaxserve.engine.snapshot.multi_host import SingleHost
from jaxserve.engine.snapshot.restorer import Restorer
from jaxserve.engine.snapshot.snapshots import Snapshots
from jaxserve.metrics.kv_metrics import kv_metrics
from jaxserve.metrics.metric import Metric
from jaxserve.metrics.metrics import Metrics
from jaxserve.metrics.runtime_metrics import runtime_metrics
from jaxserve.runtime.adapters import AdapterSlots, StagedAdapter
from jaxserve.runtime.hardware.cpu_threads import make_room_for_collectives
from jaxserve.runtime.hardware.device_memory import reserve_memory
from jaxserve.runtime.hardware.hosts import Hosts
from jaxserve.runtime.live_weights import LiveWeights
from jaxserve.runtime.open_kv import open_kv
from jaxserve.runtime.runner import Runner
from jaxserve.runtime.startup.engine_plan import EnginePlan
from jaxserve.runtime.startup.start import StartupProgress, no_progress, start
from jaxserve.runtime.token_kv import TokenKV
from jaxserve.runtime.weights.source import WeightSource
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.structured.grammar import Grammar
from jaxserve.text import Tokenizer

_log = logging.getLogger(__name__)


def _debug(record: Record) -> None:
    """Logs a record of the event log, such as a phase of the start, an arrival or a step."""
    _log.debug("%r", record)


_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


def _refuse_after_fork() -> None:
    """A fork has none of the threads of JAX: what it dispatches would never end."""
    for engine in _ENGINES:
        engine.refuse(
            "the engine is that of the parent process, and JAX cannot run after a fork: start "
            "processes by the method 'spawn' of multiprocessing"
        )


os.register_at_fork(after_in_child=_refuse_after_fork)


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
        """`hosts`: for a multi-host job, in which every host runs such an engine."""
        self.plan = plan
        self.tokenizer = tokenizer
        self.log = log
        self.metrics = metrics
        self._kv_executor = open_kv(plan, runner, log)
        self.kv = self._kv_executor.manager
        self._token_kv = TokenKV(plan, runner, self._kv_executor.stores)
        self.scheduler = Scheduler(plan.scheduler, self.kv)
        self._closed: str | None = None
        _ENGINES.add(self)
        model, self._runner = plan.shapes.model, runner
        self.eos_token_ids = frozenset((*model.eos_token_ids, *tokenizer.eos_token_ids))
        self.counters = runner.counters
        self.adapters = AdapterSlots(plan, runner, self._adapters_in_use)
        self._input = InputProcessor(
            plan.config,
            tokenizer,
            model.vocab_size,
            self.eos_token_ids,
            log.now,
            plan.shapes.processors.names,
            model.hidden_size,
            self.adapters.use,
        )
        self._core = EngineCore(
            self.scheduler,
            self._kv_executor,
            runner,
            self._input,
            log,
            self.eos_token_ids,
            self.adapters,
        )
        self._num_hosts = 1 if hosts is None else hosts.num_hosts
        live = LiveWeights(plan, runner.memory)
        self.weights = EngineWeights(
            self._core, live, plan, self._num_hosts, self.check_open, self.refuse
        )
        self._replicated = None if hosts is None else ReplicatedCore(self._core, self._input, hosts)
        self._driver = self._replicated or self._core
        limit = plan.config.max_model_len
        restorer = Restorer(self._core, self._input, tokenizer, self.adapters, limit)
        facts = SnapshotFacts(plan, tokenizer)
        together = self._replicated or SingleHost(self._core)
        access = EngineAccess(
            self._core,
            self._token_kv,
            restorer,
            facts,
            self.check_open,
            together,
            self._num_hosts,
        )
        self.snapshots, self.migration = Snapshots(access), Migration(access, plan.memory)
        if self._replicated is not None:
            self._replicated.on_collective = self.snapshots.join
            self._replicated.stopped = self._stopped

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        *,
        progress: StartupProgress = no_progress,
        keep_events: bool = False,
    ) -> Self:
        """Open the model, compile programs and load weights; ready to serve on return.

        `keep_events` keeps the whole event log, for a trace file. Raises ModelError, ConfigError
        or MemoryPlanError.
        """
        metrics = Metrics()
        sinks = [metrics.fold, _debug] if _log.isEnabledFor(logging.DEBUG) else [metrics.fold]
        log = EventLog(*sinks, clock=monotonic_us, keep_all=keep_events)
        begin_us = log.now()
        _log.info("loading %s", config.model)
        make_room_for_collectives()
        reserve_memory(config.memory_utilization)
        hosts = Hosts() if jax.process_count() > 1 else None
        try:
            plan, tokenizer, runner = start(config, log, progress, hosts)
            _log.info("%s, after %.1f s", plan, (log.now() - begin_us) / 1e6)
            return cls(plan, tokenizer, runner, log, metrics, hosts)
        except BaseException:
            if hosts is not None:
                hosts.close()
            raise

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished, or a dispatched step is not yet read; False once the
        engine has closed, has failed, or follows a host 0 that has closed its own."""
        return self._closed is None and self._core.has_work

    @property
    def weight_source(self) -> WeightSource | None:
        """The owner of the model's parameters; None once the engine is closed."""
        return self._runner and self._runner.weights

    @property
    def is_led(self) -> bool:
        """Whether this is another host than 0, whose engine is open, as is that of host 0."""
        several = self._replicated
        return several is not None and not (several.leads or several.ended or self._closed)

    def add(
        self,
        request_id: str,
        prompt: Prompt | TokenizedPrompt,
        params: SamplingParams | PoolingParams,
        priority: int | None = None,
        tenant: str | None = None,
        shared_prefix: SharedPrefix | None = None,
        grammar: Grammar | None = None,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Request:
        """Accept a request. Text is tokenized with the model's special tokens. With PoolingParams
        nothing is generated, and the output has the prompt's embedding.

        Requests of different tenants share no cached prefix; `fair_share` divides the engine among
        tenants. Requests with different `cache_salt`s share no cached prefix either.
        `shared_prefix`: the prefix that this prompt is known to share with other requests.
        `grammar`: that of `preparation` for these params; if None, it is compiled here.
        `lora_request`: the adapter to use, which is loaded if it is not; requests with different
        adapters share no cached prefix.

        Raises RequestError for an invalid request, before any state changes, AdapterError for an
        adapter that does not fit, EngineClosedError on a closed engine and EngineAsleepError on a
        sleeping one.
        """
        self.check_open()
        self._core.check_awake()
        if request_id in self._requests:
            raise RequestError(f"request_id {request_id!r} is in use by an unfinished request.")
        if grammar is None and (preparation := self.preparation(params)) is not None:
            grammar = preparation.result()
        added = self._input.process(
            request_id, prompt, params, priority, tenant, shared_prefix, cache_salt, lora_request
        )
        with interrupts_held():
            return self._driver.apply(added, grammar)

    def preparation(self, params: SamplingParams | PoolingParams) -> Future[Grammar] | None:
        """The grammar of `params.structured_outputs`, if set, for `add`: a thread compiles it while
        the engine runs. The future can be cancelled.

        Raises RequestError, also by the future, for a grammar that is invalid, too large or too
        slow to compile, or when too many are queued.
        """
        return self._input.grammar(params)

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """A prompt's token ids, in the form `add` takes. Raises RequestError for a bad prompt."""
        return self._input.tokenize(prompt)

    def abort(self, request_id: str) -> Request | None:
        """Abort a request; the tokens it has are its output. None if it has already finished."""
        with interrupts_held():
            return self._driver.apply(Abort(request_id))

    def set_priority(self, request_id: str, priority: int) -> bool:
        """Change the priority of a request, lower runs first; False if it has finished.

        Raises RequestError if `priority` is not an integer.
        """
        check_priority(priority)
        with interrupts_held():
            return self._driver.apply(SetPriority(request_id, priority)) is not None

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache. Running requests keep their pages."""
        self._driver.apply(ResetPrefixCache())

    @property
    def _requests(self) -> dict[str, Request]:
        return self._core.requests

    def follow(self) -> None:
        """Run every step that host 0 runs, until it closes its engine: for hosts that receive no
        requests themselves. Raises ConfigError without other hosts, DistributedError, or as `step`
        does."""
        if self._replicated is None:
            raise ConfigError("follow is for the hosts beside host 0, but there is one host alone.")
        while self._closed is None:
            self._step(wait=True)

    def step(self) -> list[Request]:
        """Schedule and dispatch a step, then read the oldest one. Returns the requests that gained
        tokens or finished; empty while the pipeline fills.

        A device error closes the engine and is raised. Ctrl-C is delayed until the step ends.
        Raises EngineAsleepError on a sleeping engine.
        """
        if not self.has_work:
            self._core.check_awake()
        return self._step()

    def _step(self, **options: bool) -> list[Request]:
        self.check_open()
        touched: list[Request] | None = None
        try:
            with interrupts_held():
                touched = self._driver.step(**options)
        except BaseException as error:
            if touched is None:  # Interrupted within the step: the device state is inconsistent.
                self._stopped(error)
            raise
        if self._replicated is not None and self._replicated.ended:
            self._closed = "host 0 has closed its engine"
        return touched

    def _stopped(self, error: BaseException) -> None:
        self._closed = f"the engine stopped: {type(error).__name__}: {error}"

    def load_adapter(
        self, adapter: LoRARequest | StagedAdapter, in_place: bool = False, pinned: bool = True
    ) -> None:
        """As `LLM.add_lora`. An adapter that is not `pinned` makes room for the next one when no
        request uses it."""
        with interrupts_held():
            self._core.apply(LoadAdapter(adapter, in_place, pinned))

    def unload_adapter(self, name: str) -> None:
        """As `LLM.remove_lora`."""
        self._core.apply(UnloadAdapter(name))

    def _adapters_in_use(self) -> list[LoadedAdapter]:
        """Those of unfinished requests."""
        outputs = (output for each in self._requests.values() for output in each.sequence_outputs)
        return [output.seq.adapter for output in outputs if output.seq.adapter is not None]

    def output(self, request: Request) -> RequestOutput:
        """The output of a request so far, with its timings."""
        sequences = [sequence_output.seq for sequence_output in request.sequence_outputs]
        served = [seq.seq_id for seq in sequences if seq.seq_id in self.metrics]
        if not served:  # It had finished before it was restored.
            return request.output(RequestMetrics(arrival_us=sequences[0].arrival_us))
        return request.output(self.metrics.request(served))

    def get_metrics(self) -> dict[str, Metric]:
        """All metrics, by exported name."""
        of_steps = self.metrics.get_metrics(self.log.now())
        of_kv = kv_metrics(self.kv, self.plan.config.max_model_len)
        return of_steps | of_kv | runtime_metrics(self.counters)

    def refuse(self, reason: str) -> None:
        """Accept no more requests, for example while a step hangs in another thread."""
        self._closed = reason

    def close(self) -> None:
        """Abort all requests and free the device's memory. Can be called twice."""
        try:
            self._driver.close(failed=self._closed is not None)
        finally:
            if self._runner is not None:
                self._runner.close()
            self._runner = None
            self._token_kv.close()
            self.weights.close()
            self.adapters.close()
            self._closed = self._closed or "the engine was closed"

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """The sampling defaults of the model's generation_config.json, with `overrides`."""
        defaults = dict(self.plan.shapes.model.default_sampling)
        return SamplingParams.from_defaults(defaults, **overrides)

    def check_open(self) -> None:
        """Raises EngineClosedError when it was closed, or a step or a change of its memory has
        failed."""
        if self._closed:
            raise EngineClosedError(f"{self._closed}; make a new one.")
