"""The engine behind an event loop: one thread steps it, any number of coroutines wait on it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, Self

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.metrics import Metric
from jaxserve.engine.prompts import Prompt
from jaxserve.engine.request import Request
from jaxserve.errors import EngineClosedError
from jaxserve.outputs import Delta, RequestOutput
from jaxserve.runtime.startup import EnginePlan, Progress, no_progress
from jaxserve.sampling_params import SamplingParams
from jaxserve.text import Tokenizer

Update = Delta | RequestOutput | BaseException


@dataclasses.dataclass
class _Listener:
    """Where the updates of one request go: deltas, then its output or what went wrong."""

    loop: asyncio.AbstractEventLoop
    updates: asyncio.Queue[Update]

    def send(self, update: Update) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed: nobody listens any more
            self.loop.call_soon_threadsafe(self.updates.put_nowait, update)


class AsyncEngine:
    """LLM for servers: coroutines in place of calls. Requests of any number of tasks are batched.

    The loop thread alone changes the engine; everything else reaches it as a command.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._listeners: dict[str, _Listener] = {}
        self._ids = itertools.count()
        self._closing = False
        self._ended = False
        self._door = threading.Lock()  # a command is put before the end, or not at all
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._thread.start()

    @classmethod
    def load(
        cls,
        model: str | Path = EngineConfig.model,
        *,
        progress: Progress = no_progress,
        **settings: Any,
    ) -> Self:
        """Load a model and start serving it; `settings` as for LLM. Blocks until ready."""
        return cls(Engine.load(EngineConfig.of(model=model, **settings), progress=progress))

    def get_tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def plan(self) -> EnginePlan:
        """Sizes, memory and programs of this engine."""
        return self._engine.plan

    def chat_prompt(
        self,
        messages: SequenceOf[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **template_variables: Any,
    ) -> list[int]:
        """Token ids of a conversation laid out by the model's chat template."""
        return self._engine.chat_prompt(messages, add_generation_prompt, **template_variables)

    def default_sampling_params(self, **overrides: Any) -> SamplingParams:
        """What the model's generation_config.json recommends, with `overrides`."""
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

        Raises RequestError when the request is refused, EngineClosedError when the engine ends.
        """
        return await self._output(
            self._updates(prompt, sampling_params, request_id, priority, tenant)
        )

    async def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int | None = None,
        tenant: str | None = None,
    ) -> AsyncIterator[Delta]:
        """Deltas of one prompt as they come. Leaving the loop early aborts the request."""
        updates = self._updates(prompt, sampling_params, request_id, priority, tenant)
        async with contextlib.aclosing(updates):
            async for update in updates:
                if isinstance(update, Delta):
                    yield update

    async def abort(self, request_id: str) -> None:
        """End a request early, if it is still running."""
        self._command(lambda: self._abort(request_id))

    async def set_priority(self, request_id: str, priority: int) -> None:
        """Change the priority of a request, lower running first, if it is still running."""
        self._command(lambda: self._engine.set_priority(request_id, priority))

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self._command(self._engine.reset_prefix_cache)

    async def checkpoint(
        self, directory: str | Path, with_kv: bool = True, deadline_s: float | None = None
    ) -> None:
        """Write down what is unfinished, as LLM.checkpoint does: before closing, when the server is
        told to stop."""
        await self._result_of(lambda: self._engine.checkpoint(directory, with_kv, deadline_s))

    async def restore(self, directory: str | Path) -> dict[str, asyncio.Task[RequestOutput]]:
        """Take up the requests of a checkpoint: each one's output, by its id, for whoever comes to
        ask for it. Cancelling a task aborts the request. Raises CheckpointError."""
        loop = asyncio.get_running_loop()
        listeners: dict[str, _Listener] = {}

        def restore() -> None:
            for request in self._engine.restore(directory):
                listener = _Listener(loop, asyncio.Queue())
                listeners[request.request_id] = self._listeners[request.request_id] = listener
                self._publish(request)

        await self._result_of(restore)
        return {
            request_id: asyncio.create_task(self._output(self._listen(request_id, listener)))
            for request_id, listener in listeners.items()
        }

    def get_metrics(self) -> dict[str, Metric]:
        return self._engine.snapshot()

    def close(self, timeout_s: float = 30.0) -> None:
        """Abort what runs, stop the thread and free the device. May be called twice."""
        self._closing = True
        self._command(lambda: None)
        self._thread.join(timeout_s)

    async def _updates(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None,
        priority: int | None,
        tenant: str | None,
    ) -> AsyncIterator[Update]:
        if params is None:
            params = self.default_sampling_params()
        request_id = request_id or self._next_id()
        listener = _Listener(asyncio.get_running_loop(), asyncio.Queue())
        add = functools.partial(self._add, request_id, prompt, params, priority, tenant, listener)
        if self._closing or not self._command(add):
            raise self._closed()
        async with contextlib.aclosing(self._listen(request_id, listener)) as updates:
            async for update in updates:
                yield update

    async def _output(self, updates: AsyncIterator[Update]) -> RequestOutput:
        async for update in updates:
            if isinstance(update, RequestOutput):
                return update
        raise EngineClosedError("the engine ended the request without an output.")

    async def _listen(self, request_id: str, listener: _Listener) -> AsyncIterator[Update]:
        """Updates of a request until it ends; aborts it when left early."""
        try:
            while True:
                update = await listener.updates.get()
                if isinstance(update, BaseException):
                    raise update
                yield update
                if isinstance(update, RequestOutput):
                    return
        finally:
            self._command(lambda: self._abort_of(request_id, listener))

    def _next_id(self) -> str:
        """An id that no request under way has; restored ones come with theirs."""
        ids = (f"async-{number}" for number in self._ids)
        return next(request_id for request_id in ids if request_id not in self._listeners)

    async def _result_of(self, work: Callable[[], None]) -> None:
        """Have the loop thread do something between steps; raises what that raises."""
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def command() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except Exception as error:
                    done.set_exception(error)

        if self._closing or not self._command(command):
            raise self._closed()
        await asyncio.wrap_future(done)

    def _closed(self) -> EngineClosedError:
        error = EngineClosedError("the engine is closed; make a new one.")
        error.__cause__ = self._failure
        return error

    def _command(self, command: Callable[[], None]) -> bool:
        """Have the loop thread carry out a command; False when that thread has ended."""
        with self._door:
            if not self._ended:
                self._commands.put(command)
            return not self._ended

    # In the loop thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._obey(wait=not self._engine.has_work)
                if self._engine.has_work and not self._closing:
                    for request in self._engine.step():
                        self._publish(request)
        except BaseException as error:
            self._failure = error
        finally:
            self._end()

    def _obey(self, wait: bool) -> None:
        """Carry out the commands given so far; with `wait`, at least one."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._commands.get(block=wait)()
                wait = False

    def _add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        priority: int | None,
        tenant: str | None,
        listener: _Listener,
    ) -> None:
        try:
            self._engine.add(request_id, prompt, params, priority, tenant)
        except Exception as error:
            listener.send(error)
        else:
            self._listeners[request_id] = listener

    def _abort(self, request_id: str) -> None:
        request = self._engine.abort(request_id)
        if request is not None:
            self._publish(request)

    def _abort_of(self, request_id: str, listener: _Listener) -> None:
        """Abort a request that nobody listens to any more, unless its id has a new owner."""
        if self._listeners.get(request_id) is listener:
            self._abort(request_id)

    def _publish(self, request: Request) -> None:
        listener = self._listeners.get(request.request_id)
        if listener is None:
            return
        for delta in request.take_deltas():
            listener.send(delta)
        if request.finished:
            del self._listeners[request.request_id]
            listener.send(self._engine.output(request))

    def _end(self) -> None:
        with self._door:
            self._ended = True
        self._engine.close()
        reason = f": {self._failure}" if self._failure else ""
        while not self._commands.empty():
            with contextlib.suppress(Exception):
                self._commands.get_nowait()()
        for listener in self._listeners.values():
            listener.send(EngineClosedError(f"the engine was closed{reason}"))
        self._listeners.clear()
