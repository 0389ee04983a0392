"""Signal handlers for the length of a block, and who installs any."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from jaxserve.core.process.signals import interrupts_held, signals_handled

ROOT = Path(__file__).parents[2]


def send(number):
    os.kill(os.getpid(), number)


@pytest.fixture
def received():
    """Numbers of the SIGTERMs that reach the handler installed before."""
    numbers = []
    with signals_handled(lambda number, _: numbers.append(number), signal.SIGTERM):
        yield numbers


def test_the_earlier_handler_is_back_after_an_error(received):
    inner = []
    with (
        pytest.raises(KeyError),
        signals_handled(lambda number, _: inner.append(number), signal.SIGTERM),
    ):
        send(signal.SIGTERM)
        raise KeyError
    send(signal.SIGTERM)
    assert inner == received == [signal.SIGTERM]


def test_signals_are_deferred_to_the_end_of_the_block(received):
    with pytest.raises(KeyError), interrupts_held():
        send(signal.SIGTERM)
        assert not received
        raise KeyError
    assert received == [signal.SIGTERM]


def test_only_a_second_interrupt_is_not_deferred():
    reached = False
    with pytest.raises(KeyboardInterrupt), interrupts_held():
        send(signal.SIGINT)
        reached = True
        send(signal.SIGINT)
        pytest.fail("it was deferred")
    assert reached


def test_sigterm_goes_before_an_interrupt(received):
    with interrupts_held():
        send(signal.SIGINT)
        send(signal.SIGTERM)
    assert received == [signal.SIGTERM]


def test_one_module_replaces_handlers():
    """Others use it, ignore signals for good (`SIG_IGN`), or have the event loop's handlers."""
    replacing = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "jaxserve").rglob("*.py")
        if re.search(r"signal\.signal\((?!.*SIG_IGN)", path.read_text())
    }
    assert replacing == {"jaxserve/core/process/signals.py"}
