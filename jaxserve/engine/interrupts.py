"""Defers Ctrl-C and SIGTERM to the end of a step."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM to the end of the block; a second Ctrl-C is not deferred.

    A program's arguments are donated: an interrupt between its call and the storing of its results
    would lose the device state. Signals reach the main thread only, so in other threads, and
    without a signal handler, there is nothing to defer.
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
            # The SIGTERM handler saves the work; a KeyboardInterrupt would cut that short.
            number, frame = max(held, key=lambda signalled: signalled[0] == signal.SIGTERM)
            handlers[number](number, frame)
