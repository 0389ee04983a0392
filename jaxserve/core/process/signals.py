"""Signal handlers: of a starting process, and for the length of a block. Python runs them in the
main thread."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

STOPPED = os.EX_TEMPFAIL
"""Exit status of a process that SIGTERM stopped with work left: restart it."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit status of a command that Ctrl-C ended."""

Handler = Callable[[int, FrameType | None], object]


def end_on_interrupt() -> None:
    """Ctrl-C ends the process at once, as long as its modules are imported: during an
    import KeyboardInterrupt is printed as a traceback, lost in a callback of JAX, or ends the
    process otherwise. Other handlers are kept."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def ends_on_interrupt() -> bool:
    """Whether Ctrl-C ends the process without an exception."""
    return signal.getsignal(signal.SIGINT) is signal.SIG_DFL


def raise_on_interrupt() -> None:
    """Ctrl-C is KeyboardInterrupt again, after `end_on_interrupt`."""
    if ends_on_interrupt():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextlib.contextmanager
def signals_handled(handler: Handler, *numbers: int) -> Iterator[None]:
    """Within the block `handler` handles these signals, after it those that did before. For the
    main thread only."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM to the end of the block; a second Ctrl-C is not deferred.

    A program's arguments are donated: an interrupt between its call and the storing of its results
    would lose the device state. In other threads than the main one, and without a signal handler,
    there is nothing to defer.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread() or not handlers:
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and any(number == earlier for earlier, _ in held):
            handlers[number](number, frame)
        held.append((number, frame))

    try:
        with signals_handled(hold, *handlers):
            yield
    finally:
        if held:
            # The SIGTERM handler saves the work; a KeyboardInterrupt would cut that short.
            number, frame = max(held, key=lambda signalled: signalled[0] == signal.SIGTERM)
            handlers[number](number, frame)
