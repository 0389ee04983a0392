from __future__ import annotations

import threading

import pytest

from jaxserve.core.events import (
    Admitted,
    Arrived,
    Collected,
    Dispatched,
    EventLog,
    Failed,
    Finished,
    Phase,
    Preempted,
    Resumed,
    Transferred,
    monotonic_us,
)


class Ticks:
    """A clock that moves on by one at each reading."""

    def __init__(self) -> None:
        self.us = 0

    def __call__(self) -> int:
        self.us += 1
        return self.us


def test_records_are_stamped_in_the_order_they_are_written():
    log = EventLog(clock=Ticks(), keep_all=True)
    log.arrived(7, "a", prompt_tokens=12)
    log.admitted(7, cached_tokens=8)
    log.preempted(7)
    log.resumed(7)
    log.finished(7, "stop")
    log.failed(8, "boom")
    assert log.records == [
        Arrived(1, 7, "a", 12),
        Admitted(2, 7, 8),
        Preempted(3, 7),
        Resumed(4, 7),
        Finished(5, 7, "stop"),
        Failed(6, 8, "boom"),
    ]


def test_a_step_is_two_records_whatever_its_size():
    log = EventLog(clock=Ticks(), keep_all=True)
    for step, running in enumerate((1, 64)):
        log.dispatched(
            step,
            "d64",
            begin_us=10,
            scheduled_us=13,
            packed_us=18,
            decode_rows=running,
            prefill=[(3, 16), (4, 5)],
            padded_tokens=2,
            pages_used=5,
            pages_total=9,
        )
        log.collected(step, range(running), begin_us=30, ready_us=42)
    assert [type(record) for record in log.records] == [Dispatched, Collected] * 2


def test_host_times_of_a_step_are_contiguous():
    log = EventLog(clock=lambda: 25, keep_all=True)
    log.dispatched(
        0,
        "d4",
        begin_us=10,
        scheduled_us=13,
        packed_us=18,
        decode_rows=4,
        prefill=iter([(3, 16), (4, 5)]),
        padded_tokens=0,
        pages_used=5,
        pages_total=9,
    )
    log.collected(0, iter([1, 2]), iter([1, 3]), begin_us=30, ready_us=42)
    dispatched, collected = log.records
    assert (dispatched.schedule_us, dispatched.pack_us, dispatched.dispatch_us) == (3, 5, 7)
    assert dispatched.prefill_tokens == 21
    assert collected == Collected(42, 0, 30, (1, 2), (1, 3))
    assert collected.wait_us == 12


def test_a_move_is_logged_with_the_times_it_had():
    """Other threads make moves; the log hears of them later."""
    log = EventLog(clock=lambda: 99, keep_all=True)
    for error in (None, "OSError: disk full"):
        log.transferred(
            "device", "host", pages=3, num_bytes=96, begin_us=40, end_us=55, error=error
        )
    assert log.records == [
        Transferred(55, "device", "host", 3, 96, 40, None),
        Transferred(55, "device", "host", 3, 96, 40, "OSError: disk full"),
    ]


def test_nothing_is_kept_unless_asked():
    seen = []
    log = EventLog(seen.append, clock=Ticks())
    log.arrived(0, "a", 1)
    assert log.records == []
    assert seen == [Arrived(1, 0, "a", 1)]


def test_a_phase_is_logged_when_it_ends_well():
    log = EventLog(clock=Ticks(), keep_all=True)
    with log.phase("startup", "weights"), log.phase("compile", "d4"):
        pass
    with pytest.raises(OSError), log.phase("startup", "tokenizer"):
        raise OSError
    assert log.records == [Phase(3, "compile", "d4", 2), Phase(4, "startup", "weights", 1)]


def test_threads_write_one_monotonic_sequence():
    log = EventLog(keep_all=True)

    def write(thread: int) -> None:
        for i in range(500):
            log.arrived(1000 * thread + i, "r", 1)

    threads = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    times = [record.time_us for record in log.records]
    assert times == sorted(times)
    assert len({record.sequence for record in log.records}) == 2000


def test_the_clock_reads_whole_microseconds():
    assert isinstance(monotonic_us(), int)
    assert monotonic_us() <= monotonic_us()
