"""Ctrl-C and termination between steps instead of within one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait for the end of the block; a second Ctrl-C does not wait.

    A program's arguments are donated: an interrupt after it was called and before its results are
    stored would lose the device's state. Signals reach the main thread only, so elsewhere, and
    where nobody handles them, there is nothing to hold.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread() or not handlers:
        yield
        return
    held = []

    def hold(number, frame) -> None:
        if number == signal.SIGINT and any(number == earlier for earlier, _ in held):
            handlers[number](number, frame)
        held.append((number, frame))

    for number in handlers:
        signal.signal(number, hold)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if held:
            # Whoever was told to stop saves its work; Ctrl-C beside it would cut that short.
            number, frame = max(held, key=lambda signalled: signalled[0] == signal.SIGTERM)
            handlers[number](number, frame)
