"""Print a response to stdout as it is generated, and handle Ctrl-C meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from jaxserve.core.process.signals import signals_handled

if TYPE_CHECKING:
    from jaxserve.core.requests.outputs import FinishReason
    from jaxserve.engine.delta_stream import DeltaStream


@dataclasses.dataclass
class StreamedChoice:
    """One choice of a response: what was generated before its end, or before Ctrl-C."""

    text: str = ""
    token_ids: list[int] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclasses.dataclass(frozen=True)
class StreamedResponse:
    """The answers to a prompt of `prompt_tokens`, one for each of its `n` choices."""

    prompt_tokens: int
    answers: list[StreamedChoice]
    interrupted: bool


def receive(stream: DeltaStream, show: bool = True) -> StreamedResponse:
    """Receive a response until it ends or the user presses Ctrl-C, and `show` it: one answer as it
    is generated, several with a heading each when all of them have ended."""
    params = stream.request.params
    answers = [StreamedChoice() for _ in range(params.n)]
    with _deferred_interrupt() as interrupt, contextlib.closing(stream) as deltas:
        for delta in deltas:
            answer = answers[delta.index]
            answer.text += delta.text
            answer.token_ids += delta.token_ids
            answer.finish_reason = delta.finish_reason
            if show and params.n == 1:
                print(delta.text, end="", flush=True)
            if interrupt.is_set():
                break
    if show:
        if params.n == 1:
            print(flush=True)
        else:
            for number, answer in enumerate(answers, 1):
                print(f"[{number}/{params.n}]\n{answer.text}", flush=True)
        _warn_of_cut_answers(answers, params.max_tokens)
    return StreamedResponse(len(stream.request.prompt_token_ids), answers, interrupt.is_set())


def _warn_of_cut_answers(answers: list[StreamedChoice], max_tokens: int | None) -> None:
    """Say on stderr if an answer ended before the model ended it."""
    cut = [answer for answer in answers if answer.finish_reason == "length"]
    if cut:
        by_limit = len(cut[0].token_ids) == max_tokens
        limit = f"--max-tokens {max_tokens}" if by_limit else "the context limit"
        several = f"{len(cut)} of {len(answers)} answers were"
        which = several if len(answers) > 1 else "The answer was"
        print(f"{which} cut by {limit}.", file=sys.stderr)


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

    with signals_handled(on_interrupt, signal.SIGINT):
        yield pressed
