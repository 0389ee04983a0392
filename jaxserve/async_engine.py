"""The engine for asyncio: one thread steps it, any number of coroutines wait for outputs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar, Unpack

from jaxserve.core.config import EngineConfig, EngineSettings
from jaxserve.core.errors import EngineClosedError, StepTimeoutError
from jaxserve.core.outputs import Delta, RequestOutput
from jaxserve.core.sampling_params import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.engine.output_queue import (
    OutputDispatcher,
    OutputQueue,
    OutputStream,
    left_output,
    output_of,
)
from jaxserve.engine.prompts import Prompt, TokenizedPrompt
from jaxserve.engine.request import Request
from jaxserve.engine.snapshots import exported_params
from jaxserve.engine.watchdog import Watchdog
from jaxserve.metrics.metrics import Metric
from jaxserve.metrics.trace import write_trace
from jaxserve.runtime.startup import EnginePlan, Progress, no_progress
from jaxserve.text import Tokenizer

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class AsyncEngine:
    """LLM for servers, with coroutines. Requests of any number of tasks are batched.

    Only the loop thread changes the engine; everything else sends it commands.

    Attributes:
        ended: done when that thread has ended, by `close` or by `failure`.
    """

    def __init__(
        self,
        engine: Engine,
        trace_file: str | Path | None = None,
        watchdog_timeout: float | None = None,
    ) -> None:
        """`trace_file` receives a timeline for Perfetto when the engine is closed, if the engine
        keeps its events. `watchdog_timeout`: seconds that a step may take before the engine fails;
        0 is no limit. By default it is 20 times the slowest step so far, but at least 60 s, and
        600 s for each of the first hundred steps."""
        self._engine = engine
        self._trace_file = trace_file
        self._commands: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._dispatcher = OutputDispatcher()
        self._listeners: dict[str, tuple[OutputQueue, int]] = {}
        self._unclaimed: dict[str, Request] = {}
        self._ids = itertools.count()
        self._closing = False
        self._ended = False
        self._door = threading.Lock()  # no command is queued after the end
        self._failure: BaseException | None = None
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.ended.set_running_or_notify_cancel()  # A cancelled waiter must not cancel it.
        self._watchdog = Watchdog(watchdog_timeout, self._give_up)
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls,
        model: str | Path = EngineConfig.model,
        *,
        progress: Progress = no_progress,
        trace_file: str | Path | None = None,
        watchdog_timeout: float | None = None,
        **settings: Unpack[EngineSettings],
    ) -> Self:
        """Load a model and start serving it; arguments as for LLM and `AsyncEngine`. Blocks until
        ready."""
        config = EngineConfig.of(model=model, **settings)
        engine = Engine.load(config, progress=progress, keep_events=trace_file is not None)
        return cls(engine, trace_file, watchdog_timeout)

    def get_tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def plan(self) -> EnginePlan:
        """Sizes, memory and programs of this engine."""
        return self._engine.plan

    def chat_prompt(
        self,
        messages: SequenceOf[Mapping[str, Any]],
        add_generation_prompt: bool | None = None,
        *,
        continue_final_message: bool = False,
        tools: SequenceOf[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation in the chat template's form; see `LLM.chat_prompt`."""
        return self._engine.chat_prompt(
            messages,
            add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """The defaults of the model's generation_config.json, with `overrides`."""
        return self._engine.default_sampling_params(**overrides)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        tenant: str | None = None,
    ) -> RequestOutput:
        """The finished output of one prompt. Cancelling the task aborts the request.

        Raises RequestError when the request is rejected, EngineClosedError when the engine ends.
        """
        options = request_id, priority, tenant
        async with self._one(prompt, sampling_params, options, wants_deltas=False) as updates:
            return await output_of(updates)

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        tenant: str | None = None,
    ) -> AsyncIterator[Delta]:
        """Deltas of one prompt as they arrive; those that arrive between reads are merged.
        Leaving the loop early aborts the request."""
        options = request_id, priority, tenant
        async with self._one(prompt, sampling_params, options, wants_deltas=True) as updates:
            async for _, update in updates:
                if not isinstance(update, RequestOutput):
                    for delta in update:
                        yield delta

    async def submit(
        self,
        prompts: SequenceOf[Prompt | TokenizedPrompt],
        sampling_params: SamplingParams,
        request_ids: SequenceOf[str],
        priority: int | None = None,
        tenant: str | None = None,
        *,
        cache_salt: str | None = None,
        wants_deltas: bool = True,
    ) -> OutputStream:
        """Add prompts to the engine, all of them or none, and stream the outputs of each.
        Prompts with different `cache_salt`s share no cached prefix.

        Raises RequestError when one of them is rejected, EngineClosedError when the engine has
        ended.
        """
        # Compiling a grammar may take long, so it must not block the loop thread.
        preparation = self._engine.preparation(sampling_params)
        grammar = None if preparation is None else await asyncio.wrap_future(preparation)
        output_queue = OutputQueue(asyncio.get_running_loop(), wants_deltas)
        listeners = dict(
            zip(request_ids, ((output_queue, i) for i in range(len(prompts))), strict=True)
        )
        updates = self._updates(output_queue, listeners)

        def add() -> None:
            try:
                for prompt, (request_id, listener) in zip(prompts, listeners.items()):
                    self._engine.add(
                        request_id,
                        prompt,
                        sampling_params,
                        priority,
                        tenant,
                        grammar=grammar,
                        cache_salt=cache_salt,
                    )
                    self._listeners[request_id] = listener
            except Exception as error:
                self._abandon(listeners)
                self._dispatcher.put(output_queue, 0, error)
            else:
                self._dispatcher.put(output_queue, 0, [])

        if self._closing or not self._command(add):
            raise self._closed()
        try:
            await output_queue.wait()
        except BaseException:
            updates.leave()
            raise
        return updates

    @contextlib.asynccontextmanager
    async def _one(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        options: tuple[str | None, int | None, str | None],
        wants_deltas: bool,
    ) -> AsyncIterator[OutputStream]:
        """One prompt's updates, with defaults for missing arguments of `generate`."""
        request_id, priority, tenant = options
        params = self.default_sampling_params() if sampling_params is None else sampling_params
        ids = [request_id or self._next_id()]
        async with await self.submit(
            [prompt], params, ids, priority, tenant, wants_deltas=wants_deltas
        ) as updates:
            yield updates

    async def abort(self, request_id: str) -> None:
        """End a request early, if it is still running."""
        self._command(lambda: self._abort(request_id))

    async def set_priority(self, request_id: str, priority: int) -> None:
        """Change the priority of a request, lower running first, if it is still running.

        Raises RequestError unless `priority` is an integer, EngineClosedError when the engine has
        ended.
        """
        await self._result_of(lambda: self._engine.set_priority(request_id, priority))

    async def reset_prefix_cache(self) -> None:
        """Drop every cached prefix."""
        self._command(self._engine.reset_prefix_cache)

    async def snapshot(
        self, directory: str | Path, with_kv: bool = True, deadline_s: float | None = None
    ) -> None:
        """Save unfinished requests, like LLM.snapshot, before a server shuts down."""

        def snapshot() -> None:
            ended = [request for request in self._unclaimed.values() if request.finished]
            self._engine.snapshot(directory, with_kv, deadline_s, ended)

        await self._result_of(snapshot)

    async def restore(self, directory: str | Path) -> dict[str, Restored]:
        """Resume the requests of a snapshot, returned by id. Cancelling a task aborts its request.
        Later snapshots include them, even finished ones, until they are claimed. Raises
        SnapshotError."""
        loop = asyncio.get_running_loop()
        restored: dict[str, tuple[Request, OutputStream]] = {}

        def restore() -> None:
            for request in self._engine.restore(directory):
                updates = self._resume(request, OutputQueue(loop, wants_deltas=False))
                restored[request.request_id] = request, updates
                self._unclaimed[request.request_id] = request

        await self._result_of(restore)
        return {
            request_id: Restored(
                request.prompt_token_ids,
                request.params,
                request.sequence_outputs[0].seq.tenant,
                asyncio.create_task(left_output(updates)),
            )
            for request_id, (request, updates) in restored.items()
        }

    async def claim(self, request_id: str) -> None:
        """Mark the output of a restored request as delivered: later snapshots omit it."""
        self._command(lambda: self._unclaimed.pop(request_id, None))

    async def export_request(self, request_id: str, with_kv: bool = True) -> list[bytes]:
        """An unfinished request as bytes, for `import_request` of another engine; it runs on here
        until `abort`. Its KV is copied between two steps, which takes as long as its bytes take
        from the devices to memory. Raises as `LLM.export_request`."""
        return await self._result_of(lambda: list(self._engine.export_request(request_id, with_kv)))

    async def import_request(
        self, parts: SequenceOf[bytes], request_id: str | None = None, *, wants_deltas: bool = True
    ) -> OutputStream:
        """Add a request that another engine has exported, by default under the id that it had
        there, and stream its output from its first token on. Leaving the stream early aborts the
        request. Raises SnapshotError as `LLM.import_request`, or when the id is in use."""
        preparation = self._engine.preparation(exported_params(parts))
        if preparation is not None:  # Compiled grammars are cached.
            await asyncio.wrap_future(preparation)
        output_queue = OutputQueue(asyncio.get_running_loop(), wants_deltas)
        return await self._result_of(
            lambda: self._resume(self._engine.import_request(parts, request_id), output_queue)
        )

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine, if any."""
        return self._failure

    @property
    def stalled(self) -> bool:
        """Whether the step in progress has taken more than half of the time that it may."""
        return self._watchdog.stalled

    @property
    def stuck(self) -> bool:
        """Whether the engine's thread runs on after `close`: it hangs in a step."""
        return self._closing and self._thread.is_alive()

    def get_metrics(self) -> dict[str, Metric]:
        return self._engine.get_metrics()

    def close(self, timeout_s: float = 30.0) -> None:
        """Abort running requests, stop the thread, free the device, write the trace file.
        Idempotent."""
        self._closing = True
        self._command(lambda: None)
        if not isinstance(self._failure, StepTimeoutError):
            self._thread.join(timeout_s)
        if self._trace_file is not None:
            write_trace(self._trace_file, self._engine.log.records)
            self._trace_file = None

    def _updates(
        self, output_queue: OutputQueue, listeners: Mapping[str, tuple[OutputQueue, int]]
    ) -> OutputStream:
        abandon = functools.partial(self._abandon, listeners)
        return OutputStream(output_queue, len(listeners), functools.partial(self._command, abandon))

    def _resume(self, request: Request, output_queue: OutputQueue) -> OutputStream:
        """The output of a request that begins with what another engine generated."""
        listeners = {request.request_id: (output_queue, 0)}
        self._listeners |= listeners
        self._publish(request)
        return self._updates(output_queue, listeners)

    def _next_id(self) -> str:
        """An id that no open request has; restored requests keep theirs."""
        ids = (f"async-{number}" for number in self._ids)
        return next(request_id for request_id in ids if request_id not in self._listeners)

    async def _result_of(self, work: Callable[[], _T]) -> _T:
        """Run `work` in the loop thread between steps; returns or raises what it does."""
        done: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def command() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except Exception as error:
                    done.set_exception(error)

        if self._closing or not self._command(command):
            raise self._closed()
        return await asyncio.wrap_future(done)

    def _closed(self) -> EngineClosedError:
        error = EngineClosedError("the engine is closed; make a new one.")
        error.__cause__ = self._failure
        return error

    def _command(self, command: Callable[[], object]) -> bool:
        """Queue a command for the loop thread; False when that thread has ended."""
        with self._door:
            if not self._ended:
                self._commands.put(command)
            return not self._ended

    # In the loop thread

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while not self._closing:
                self._obey(wait=not self._engine.has_work)
                if self._engine.has_work and not self._closing:
                    with self._watchdog.step():
                        touched = self._engine.step()
                    for request in touched:
                        self._publish(request)
                self._dispatcher.send()
        except BaseException as error:
            failure = error
        try:
            self._engine.close()
        except Exception as error:
            failure = failure or error
        self._end(failure)

    def _obey(self, wait: bool) -> None:
        """Run the queued commands; with `wait`, at least one.

        A command that fails is logged, and the engine continues: it concerns one request only.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get(block=wait)
                wait = False
                try:
                    command()
                except Exception:
                    _log.exception("a command failed; the engine continues")

    def _abort(self, request_id: str) -> None:
        request = self._engine.abort(request_id)
        if request is not None:
            self._publish(request)

    def _abandon(self, listeners: Mapping[str, tuple[OutputQueue, int]]) -> None:
        """Abort requests that have lost their listeners, unless new requests have their ids."""
        for request_id, listener in listeners.items():
            if self._listeners.get(request_id) is listener:
                self._abort(request_id)

    def _publish(self, request: Request) -> None:
        output_queue, number = self._listeners.get(request.request_id, (None, 0))
        if output_queue is None:
            return
        deltas = request.take_deltas()
        if deltas and output_queue.wants_deltas:
            self._dispatcher.put(output_queue, number, deltas)
        if request.finished:
            del self._listeners[request.request_id]
            self._dispatcher.put(output_queue, number, self._engine.output(request))

    def _give_up(self, error: StepTimeoutError) -> None:
        """End without the engine's thread, which hangs in a step. Called by the watchdog."""
        self._engine.refuse(str(error))
        self._end(error)

    def _end(self, failure: BaseException | None) -> None:
        """Tell everyone who waits. Does nothing if the watchdog has done it."""
        with self._door:
            if self._ended:
                return
            self._failure, self._ended = failure, True
        self._watchdog.close()
        reason = f": {failure}" if failure else ""
        while not self._commands.empty():
            with contextlib.suppress(Exception):
                self._commands.get_nowait()()
        for output_queue, number in self._listeners.values():
            error = EngineClosedError(f"the engine was closed{reason}")
            self._dispatcher.put(output_queue, number, error)
        self._listeners.clear()
        self._dispatcher.send()
        self.ended.set_result(None)


class Restored(NamedTuple):
    """A request resumed from a snapshot, and the task of its output."""

    prompt_token_ids: list[int]
    params: SamplingParams
    tenant: str | None
    output: asyncio.Task[RequestOutput]
