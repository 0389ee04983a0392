"""The share of a run in which the devices had no step, against intervals by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.core.events import Collected, Dispatched
from jaxserve.metrics.device_idle import DeviceIdle


def dispatched(step: int, packed_us: int) -> Dispatched:
    return Dispatched(packed_us + 1, step, "step-1-0", 0, 0, packed_us, 1, (), 0, 0, 9)


def collected(step: int, time_us: int, late: bool = False) -> Collected:
    return Collected(time_us, step, time_us, (), None, late=late)


def test_the_device_waits_for_the_host():
    records = [dispatched(0, 100), collected(0, 400), dispatched(1, 500), collected(1, 600)]
    assert DeviceIdle.of(records) == pytest.approx((0.2, 0.2))
    assert str(DeviceIdle.of(records)) == "20.0%"


def test_a_step_that_was_done_before_the_host_looked():
    records = [dispatched(0, 0), dispatched(1, 50), collected(0, 60, late=True), collected(1, 100)]
    idle = DeviceIdle.of(records)
    assert idle == pytest.approx((0.0, 0.6))
    assert str(idle) == "0.0% to 60.0%"


def test_without_steps_there_is_nothing_to_say():
    assert DeviceIdle.of([]) is None
    assert DeviceIdle.of([dispatched(0, 1)]) is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.booleans()), min_size=1))
def test_idle_time_lies_between_the_bounds(steps):
    """Of a device that ends a step when it ends, and a host that looks later where it is late."""
    records, now, idle_us = [], 0, 0
    for step, (gap, span, late) in enumerate(steps):
        gap *= step > 0
        begin, end = now + gap, now + gap + span
        looked = end + 3 * late
        records += [dispatched(step, begin), collected(step, looked, late)]
        idle_us += gap + looked - end
        now = looked
    found = DeviceIdle.of(records)
    assert found is not None
    assert 0 <= found.least <= idle_us / now + 1e-9
    assert idle_us / now <= found.most + 1e-9 <= 1 + 1e-9
