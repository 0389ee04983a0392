"""The watchdog of steps: what it gives up on, and what it leaves alone."""

from __future__ import annotations

import gc
import sys
import threading
import time

import pytest

from jaxserve.core.errors import StepTimeoutError
from jaxserve.engine import watchdog
from jaxserve.engine.watchdog import Watchdog


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(watchdog, "TICK_S", 0.01)


@pytest.fixture
def given_up():
    return []


def watched(timeout_s, given_up):
    return Watchdog(timeout_s, given_up.append)


def test_a_step_that_does_not_end_is_given_up_once(given_up):
    dog = watched(2, given_up)
    with pytest.raises(StepTimeoutError, match=r" 2 s.*--watchdog-timeout"), dog.step():
        begin = time.monotonic()
        while not dog.stalled:
            time.sleep(0.002)
        assert time.monotonic() - begin > 0.05 and not given_up, "it stalls before it is given up"
        while not given_up:
            time.sleep(0.002)
    assert len(given_up) == 1
    assert not dog.stalled


def test_steps_that_end_are_left_alone_however_many(given_up):
    dog = watched(1, given_up)
    begin = time.monotonic()
    while time.monotonic() < begin + 1.2:
        with dog.step():
            time.sleep(0.02)
    dog.close()
    assert not given_up and not dog.stalled


def test_0_is_no_limit(given_up):
    before = set(threading.enumerate())
    dog = watched(0, given_up)
    with dog.step():
        time.sleep(0.05)
        assert not dog.stalled
    assert not given_up and not set(threading.enumerate()) - before


def test_the_default_follows_the_slowest_step(given_up, monkeypatch):
    monkeypatch.setattr(watchdog, "NUM_FIRST", 2)
    dog = watched(None, given_up)
    assert dog.limit_s == 600
    with dog.step():
        time.sleep(0.3)
    assert dog.limit_s == 600, "the first ones may load programs"
    with dog.step():
        pass
    assert dog.limit_s == 60
    monkeypatch.setattr(watchdog, "MIN_S", 0.1)
    assert 0.1 < dog.limit_s < 60, "20 x 0.3 s, less under load"
    dog.close()


def test_no_time_passes_while_the_process_is_suspended(given_up, monkeypatch):
    """Its thread is suspended too: the one wake-up afterwards counts as one."""
    late = threading.Event()
    monotonic = time.monotonic
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: monotonic() + 3600 * late.is_set())
    dog = watched(1.0, given_up)
    with dog.step():
        late.set()
        time.sleep(0.1)
        assert not dog.stalled
    dog.close()
    assert not given_up


def test_a_step_in_a_debugger_takes_as_long_as_it_likes(given_up):
    dog = watched(0.05, given_up)

    def debugged():
        with dog.step():
            time.sleep(0.4)

    def debug():
        sys.settrace(lambda *_: lambda *_: None)
        try:
            debugged()
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=debug)
    thread.start()
    thread.join()
    dog.close()
    assert not given_up


def test_no_garbage_is_collected_while_frames_are_looked_up(monkeypatch):
    """A collection there deadlocks older Python 3.11."""
    current_frames, collecting = sys._current_frames, []

    def recorded():
        collecting.append(gc.isenabled())
        return current_frames()

    monkeypatch.setattr(sys, "_current_frames", recorded)
    assert not watchdog._debugged(threading.get_ident())
    assert collecting == [False] and gc.isenabled()
