"""Notices a step that does not end, because the device or another host hangs."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator

from jaxserve.core.errors import StepTimeoutError

TICK_S = 0.5

MIN_S = 60.0
SLOWER = 20
"""Without a timeout: a step may take this many times as long as the slowest one before it."""
FIRST_S = 600.0
NUM_FIRST = 100
"""Without a timeout: how long each of the first steps may take, which also load programs."""


class Watchdog:
    """Times the steps of one thread, and gives up on a step that takes longer than the timeout.

    Its clock is a thread that counts its own wake-ups. So no time passes while the process is
    suspended, by SIGSTOP, a debugger or a sleeping machine. A step that a Python debugger traces
    may take any time.
    """

    def __init__(
        self, timeout_s: float | None, give_up: Callable[[StepTimeoutError], object]
    ) -> None:
        """`timeout_s`: by default `SLOWER` times the slowest step so far, at least `MIN_S` and
        for the first `NUM_FIRST` steps `FIRST_S`; 0 is none. `give_up` is called once, in the
        watchdog's thread."""
        self._timeout_s = timeout_s
        self._give_up = give_up
        self._lock = threading.Lock()
        self._clock_s = 0.0
        self._begun_s: float | None = None
        self._thread_id = 0
        self._slowest_s = 0.0
        self._num_steps = 0
        self._error: StepTimeoutError | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jaxserve-watchdog", daemon=True)
        if timeout_s != 0:
            self._thread.start()

    @property
    def limit_s(self) -> float:
        """How long a step may take."""
        if self._timeout_s is not None:
            return self._timeout_s
        least_s = FIRST_S if self._num_steps < NUM_FIRST else MIN_S
        return max(least_s, SLOWER * self._slowest_s)

    @property
    def stalled(self) -> bool:
        """Whether the step in progress has taken more than half of its time."""
        begun_s = self._begun_s
        return begun_s is not None and self._clock_s - begun_s > self.limit_s / 2

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Time the block. Raises StepTimeoutError at its end if the watchdog has given up."""
        with self._lock:
            self._begun_s, self._thread_id = self._clock_s, threading.get_ident()
        try:
            yield
        finally:
            with self._lock:
                took_s, self._begun_s = self._clock_s - self._begun_s, None
                self._slowest_s = max(self._slowest_s, took_s)
                self._num_steps += 1
                if self._error is not None:
                    raise self._error

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(TICK_S):
            now = time.monotonic()
            self._clock_s += min(now - last, 2 * TICK_S)
            last = now
            with self._lock:
                if self._begun_s is None or self._clock_s - self._begun_s <= self.limit_s:
                    continue
                if _debugged(self._thread_id):
                    self._begun_s = self._clock_s
                    continue
                self._error = StepTimeoutError(
                    f"a step has not ended within {self.limit_s:g} s: the device hangs, or another "
                    "host does. If such steps are to be expected, allow them more time by "
                    "--watchdog-timeout."
                )
            self._give_up(self._error)
            return


def _debugged(thread_id: int) -> bool:
    """Whether a Python debugger traces a thread."""
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12
    if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None:
        return True
    frame = _frame_of(thread_id)
    while frame is not None:
        if frame.f_trace is not None:
            return True
        frame = frame.f_back
    return False


def _frame_of(thread_id: int) -> types.FrameType | None:
    """What a thread executes. A garbage collection that begins in `sys._current_frames` deadlocks
    the process in older Python 3.11 (python/cpython#106883), so there is none meanwhile."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread_id)
    finally:
        if enabled:
            gc.enable()
