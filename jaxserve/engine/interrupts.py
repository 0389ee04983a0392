"""Ctrl-C between steps instead of within one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block; a second one does not wait.

    A program's arguments are donated: an interrupt after it was called and before its results are
    stored would lose the device's state. Signals reach the main thread only, so elsewhere, and
    where nobody handles them, there is nothing to hold.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held = []

    def hold(number, frame) -> None:
        if held:
            handler(number, frame)
        held.append((number, frame))

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])
