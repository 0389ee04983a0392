"""Print a response to stdout as it is generated, and handle Ctrl-C meanwhile."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jaxserve.engine.delta_stream import DeltaStream


class Answer(NamedTuple):
    text: str
    interrupted: bool


def print_answer(stream: DeltaStream) -> Answer:
    """Print the response as it is generated, until it ends or the user presses Ctrl-C."""
    pieces = []
    with _deferred_interrupt() as interrupt, contextlib.closing(stream) as deltas:
        for delta in deltas:
            pieces.append(delta.text)
            print(delta.text, end="", flush=True)
            if interrupt.is_set():
                break
        print(flush=True)
    return Answer("".join(pieces), interrupt.is_set())


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[threading.Event]:
    """An event that Ctrl-C sets, so that it never interrupts an engine step.

    A second Ctrl-C raises KeyboardInterrupt as usual, for a step that takes too long.
    """
    pressed = threading.Event()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
