"""The policy of offloading: the linear program against every point of a grid."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.errors import ConfigError
from jaxserve.offline.offload_policy import (
    KINDS,
    TIERS,
    Lengths,
    MemoryCapacity,
    ModelBytes,
    PolicyRates,
    Problem,
)


def grid(parts):
    """Shares of the tiers in steps of 1 / parts."""
    return [
        (device / parts, host / parts, (parts - device - host) / parts)
        for device in range(parts + 1)
        for host in range(parts + 1 - device)
    ]


ON_DEVICE = [(1.0, 0.0, 0.0)]
ENDS = [*grid(1), (0.5, 0.5, 0.0)]


def problem(capacity, rates, lengths=(16, 8)):
    model = ModelBytes(layers=8, layer=1000, outside=500, kv_token=10, activation_token=4)
    held = MemoryCapacity(*capacity)
    return Problem(model, PolicyRates(*rates), Lengths(*lengths), held, work_bytes=7)


def brute_force(problem, rows, steps, weights, others):
    """The least seconds of these points for the weights and for the rest that fit; None if none
    does."""
    found = []
    for points in itertools.product(weights, others, others):
        shares = {
            (kind, tier): share
            for kind, point in zip(KINDS, points)
            for tier, share in zip(TIERS, point)
        }
        if problem.fits(rows, steps, shares):
            found.append(problem.seconds(rows, steps, shares))
    return min(found, default=None)


bytes_of = st.integers(0, 14_000)
second = st.floats(1e-6, 1e-2)
per_second = st.floats(1e4, 1e8)
rates_of = st.tuples(*[second] * 4, *[per_second] * 4, st.floats(0, 1))


@settings(deadline=None, max_examples=15)
@given(st.tuples(bytes_of, bytes_of, bytes_of), rates_of, st.integers(1, 4), st.integers(1, 4))
def test_no_point_of_the_grid_is_better(capacity, rates, rows, steps):
    """Whatever the machine: the program's time is at most that of the best point, what it found
    fits, and it finds something wherever the grid does."""
    one = problem(capacity, rates)
    policy, best = one.solve(rows, steps), brute_force(one, rows, steps, grid(2), ENDS)
    if policy is None:
        assert best is None
        return
    assert one.fits(rows, steps, policy.shares, slack=1e-6)
    assert all(abs(sum(policy.shares[kind, tier] for tier in TIERS) - 1) < 1e-6 for kind in KINDS)
    assert best is None or policy.token_s <= best * (1 + 1e-6)


@settings(deadline=None, max_examples=15)
@given(st.sampled_from(grid(8)), rates_of, st.integers(1, 3), st.integers(1, 3))
def test_equal_to_the_grid_where_its_best_point_is_on_it(room, rates, rows, steps):
    """The device, and then the host, have room for so many eighths of the weights, and KV and
    activations are kept on the device."""
    *times, to_host, to_disk, to_device, from_device, contention = rates
    rates = *times, min(to_host, to_device), min(to_disk, from_device), to_device, from_device
    one = problem((0, 0, 0), (*rates, contention))
    total = one.model.layers * one.model.layer
    kept = {(kind, tier): float(tier == "device") for kind in KINDS for tier in TIERS}
    device = one.held(rows, steps, kept).device - total * (1 - room[0])
    one = problem((device, total * room[1], 1e9), (*rates, contention))
    never = {(kind, tier) for kind in KINDS[1:] for tier in TIERS[1:]}
    best = brute_force(one, rows, steps, grid(8), ON_DEVICE)
    assert one.solve(rows, steps, never).token_s == pytest.approx(best, rel=1e-6)


def test_larger_blocks_share_reads_until_computing_takes_longer():
    """All weights on disk: a token of a block of k takes 1/k of a read, or its own computing."""
    read_s, step_s = 0.08, 0.01
    one = problem((50_000, 0, 1e9), (step_s, 0, 0, 0, 1e5, 1e5, 1e9, 1e9, 0), lengths=(0, 100))
    on_disk = {("weights", "host"), ("weights", "device")}
    for steps in (1, 2, 4, 16):
        policy = one.solve(1, steps, never=on_disk)
        expected = (99 * max(read_s, steps * step_s) + read_s) / (100 * steps)
        assert policy.token_s == pytest.approx(expected, rel=1e-3)
    fastest = one.best([1], [1, 2, 4, 8, 16], never=on_disk)
    assert fastest.token_s == pytest.approx(step_s, rel=0.01)


def test_nothing_fits():
    with pytest.raises(ConfigError, match=r"offload is 'auto', but no placement fits 100 bytes"):
        problem((100, 0, 0), (*[1e-3] * 4, *[1e6] * 4, 0)).best([1, 2], [1, 2])
