"""Threads for virtual CPU devices; that a real model runs with them is tests/real_model's."""

from __future__ import annotations

import os

import pytest

from jaxserve.runtime.hardware.cpu_threads import make_room_for_collectives

EIGHT = "--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=8"


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("PJRT_NPROC", "NPROC", "XLA_FLAGS"):
        monkeypatch.setenv(name, "")  # So that it is as before when the test is over.
        monkeypatch.delenv(name)
    return monkeypatch


def test_there_are_threads_beyond_those_that_devices_can_block(environment):
    environment.setenv("XLA_FLAGS", EIGHT)
    make_room_for_collectives()
    assert int(os.environ["PJRT_NPROC"]) == 2 * 8 + os.cpu_count()


@pytest.mark.parametrize("name", ["PJRT_NPROC", "NPROC"])
def test_a_size_that_is_given_is_left_alone(environment, name):
    environment.setenv("XLA_FLAGS", EIGHT)
    environment.setenv(name, "3")
    before = dict(os.environ)
    make_room_for_collectives()
    assert dict(os.environ) == before


def test_one_device_needs_none():
    make_room_for_collectives()
    assert "PJRT_NPROC" not in os.environ
