"""The thread that steps an engine for asyncio. Nothing else changes that engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from jaxserve.core.errors import EngineClosedError, StepTimeoutError
from jaxserve.engine.output_queue import OutputDispatcher, OutputQueue, OutputStream, Update
from jaxserve.engine.request import Request
from jaxserve.engine.watchdog import Watchdog

if TYPE_CHECKING:
    from jaxserve.engine.engine import Engine

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

Listener = tuple[OutputQueue, int]
"""The output queue of a request, and its number there."""


class EngineThread:
    """Steps an engine while it has work, and makes the calls of other threads between steps.

    Attributes:
        listeners: by id of a request. Only calls in this thread change them.
        ended: done when the thread has ended, or the watchdog has given up on it.
        failure: the error that ended the engine, if any.
    """

    def __init__(self, engine: Engine, watchdog_timeout: float | None) -> None:
        """`watchdog_timeout`: as for Watchdog."""
        self._engine = engine
        self._calls: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._dispatcher = OutputDispatcher()
        self.listeners: dict[str, Listener] = {}
        self._closing = False
        self._ended = False
        self._lock = threading.Lock()  # No call is queued after the end.
        self.failure: BaseException | None = None
        self.ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.ended.set_running_or_notify_cancel()  # A cancelled waiter must not cancel it.
        self._watchdog = Watchdog(watchdog_timeout, self._give_up)
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._thread.start()

    @property
    def stalled(self) -> bool:
        """Whether the step in progress has taken more than half of the time that it may."""
        return self._watchdog.stalled

    @property
    def stuck(self) -> bool:
        """Whether the thread still runs after `close`: it hangs in a step."""
        return self._closing and self._thread.is_alive()

    def call(self, work: Callable[[], object]) -> bool:
        """Queue a call of `work`; False when the thread has ended."""
        with self._lock:
            if not self._ended:
                self._calls.put(work)
            return not self._ended

    def call_open(self, work: Callable[[], object]) -> None:
        """As `call`. Raises EngineClosedError when the engine is closed or closing."""
        if self._closing or not self.call(work):
            error = EngineClosedError("the engine is closed; make a new one.")
            error.__cause__ = self.failure
            raise error

    async def result_of(self, work: Callable[[], _T]) -> _T:
        """Call `work` between steps; returns or raises what it does. Raises EngineClosedError."""
        done: concurrent.futures.Future[_T] = concurrent.futures.Future()

        def call() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except Exception as error:
                    done.set_exception(error)

        self.call_open(call)
        return await asyncio.wrap_future(done)

    def stream(self, output_queue: OutputQueue, listeners: Mapping[str, Listener]) -> OutputStream:
        """The updates of these requests; leaving it early aborts them."""
        abandon = functools.partial(self.call, functools.partial(self.abandon, listeners))
        return OutputStream(output_queue, len(listeners), abandon)

    def close(self, timeout_s: float) -> None:
        """End the thread, and with it the engine. Idempotent."""
        self._closing = True
        self.call(lambda: None)
        if not isinstance(self.failure, StepTimeoutError):
            self._thread.join(timeout_s)

    # In the thread

    def send(self, listener: Listener, update: Update | BaseException) -> None:
        """Send an update to a request's listener, with those of the step."""
        self._dispatcher.put(*listener, update)

    def publish(self, request: Request) -> None:
        """Send what a request has gained to its listener, if it has one."""
        listener = self.listeners.get(request.request_id)
        if listener is None:
            return
        deltas = request.take_deltas()
        if deltas and listener[0].wants_deltas:
            self.send(listener, deltas)
        if request.finished:
            del self.listeners[request.request_id]
            self.send(listener, self._engine.output(request))

    def abort(self, request_id: str) -> None:
        """Abort a request, if it has not finished, and send its output."""
        request = self._engine.abort(request_id)
        if request is not None:
            self.publish(request)

    def abandon(self, listeners: Mapping[str, Listener]) -> None:
        """Abort requests that have lost their listeners, unless new requests have their ids."""
        for request_id, listener in listeners.items():
            if self.listeners.get(request_id) is listener:
                self.abort(request_id)

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while not self._closing:
                # The last call may have failed in the middle of a change, and on another host
                # than 0 the last step may have been told that no other follows.
                self._engine.check_open()
                self._make_calls(wait=not self._engine.has_work)
                if self._engine.has_work and not self._closing:
                    with self._watchdog.step():
                        touched = self._engine.step()
                    for request in touched:
                        self.publish(request)
                self._dispatcher.send()
        except BaseException as error:
            failure = error
        try:
            self._engine.close()
        except Exception as error:
            failure = failure or error
        self._end(failure)

    def _make_calls(self, wait: bool) -> None:
        """Make the queued calls; with `wait`, at least one.

        A call that fails is logged, and the engine continues: it concerns one request only.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._calls.get(block=wait)
                wait = False
                try:
                    call()
                except Exception:
                    _log.exception("a call failed; the engine continues")

    def _give_up(self, error: StepTimeoutError) -> None:
        """End without the thread, which hangs in a step. Called by the watchdog."""
        self._engine.refuse(str(error))
        self._end(error)

    def _end(self, failure: BaseException | None) -> None:
        """Fail all calls and requests that remain. Does nothing if the watchdog has done it."""
        with self._lock:
            if self._ended:
                return
            self.failure, self._ended = failure, True
        self._watchdog.close()
        reason = f": {failure}" if failure else ""
        while not self._calls.empty():
            with contextlib.suppress(Exception):
                self._calls.get_nowait()()
        for listener in self.listeners.values():
            self.send(listener, EngineClosedError(f"the engine was closed{reason}"))
        self.listeners.clear()
        self._dispatcher.send()
        self.ended.set_result(None)
