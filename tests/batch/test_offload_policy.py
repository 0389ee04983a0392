"""The policy of offloading: the linear program against every point of a grid."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

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
from jaxserve.runtime.hardware.host_cpu import HostRates
from jaxserve.runtime.planning.host_attention import HostAttention, HostReads


def grid(parts):
    """Shares of the tiers in steps of 1 / parts."""
    return [
        (device / parts, host / parts, (parts - device - host) / parts)
        for device in range(parts + 1)
        for host in range(parts + 1 - device)
    ]


ON_DEVICE = [(1.0, 0.0, 0.0)]
ENDS = [*grid(1), (0.5, 0.5, 0.0)]


def problem(capacity, rates, lengths=(16, 8), **more):
    """`rates`: seconds of a decode step and of each row of it, then as PolicyRates has them."""
    step_s, row_s, *rates = rates
    decode_s = {rows: step_s + rows * row_s for rows in (1, 2, 4)}
    model = ModelBytes(layers=8, layer=1000, outside=500, kv_token=10, activation_token=4)
    held, rates = MemoryCapacity(*capacity), PolicyRates(decode_s, *rates)
    return Problem(model, rates, Lengths(*lengths), held, work_bytes=7, **more)


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
@given(
    st.tuples(bytes_of, bytes_of, bytes_of),
    rates_of,
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.integers(1, 9), max_size=9),
)
def test_no_point_of_the_grid_is_better(capacity, rates, rows, steps, outputs):
    """Whatever the machine and the job: the program's time is at most that of the best point, what
    it found fits, and it finds something wherever the grid does."""
    job = {"prefill_tokens": (8, 32), "host_kv": lambda *step: (1e-6 * step[2], 1e-5, 1e-4)}
    one = problem(capacity, rates, **(job if outputs else {}))
    if outputs:
        one = dataclasses.replace(one, lengths=Lengths.of(16 * len(outputs), outputs))
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


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 8))
def test_the_decodes_of_a_job_are_those_of_an_engine_that_refills(outputs, most):
    """One after another: as many sequences as run at once, each of which has as many decodes as
    tokens after its first."""
    waiting, running, expected = [length - 1 for length in outputs], [], Counter()
    while waiting or running:
        while waiting and len(running) < most:
            running.append(waiting.pop(0))
            running = [left for left in running if left]
        expected[len(running)] += 1
        running = [left - 1 for left in running if left > 1]
    expected.pop(0, None)
    assert Lengths.of(0, outputs).decodes(most) == expected


def test_prompts_take_as_many_passes_as_their_tokens_fill_steps():
    """All weights on disk, so that a pass takes a read, or what it computes: five prompts of 16
    tokens, in steps of at most 32, one of which is padded to 16."""
    read_s = 0.08
    one = problem((0, 0, 0), (0, 0, 0, 1e-3, 1e5, 1e5, 1e9, 1e9, 0), prefill_tokens=(16, 32))
    shares = {(kind, tier): float(tier == "device") for kind in KINDS for tier in TIERS}
    shares |= {("weights", "device"): 0.0, ("weights", "disk"): 1.0}
    one = dataclasses.replace(one, lengths=Lengths.of(5 * 16, [1] * 5))
    assert one.seconds(4, 2, shares) == pytest.approx(2 * read_s / 5, rel=1e-3)
    slow = dataclasses.replace(one, rates=dataclasses.replace(one.rates, prefill_s=0.01))
    assert slow.seconds(4, 2, shares) == pytest.approx(0.01 * (2 * 32 + 16) / 5)
    longer = dataclasses.replace(slow, lengths=Lengths.of(5 * 20, [1] * 5))
    assert longer.seconds(4, 2, shares) == pytest.approx(0.01 * (3 * 32 + 16) / 5)
    # A step of one sequence has no tokens of the next one's prompt.
    assert longer.seconds(1, 8, shares) == pytest.approx(0.01 * (5 * 32) / 5)


def test_kv_on_the_host_costs_what_the_engine_chooses():
    """Decodes send their queries, and wait for the host; chunks of a prompt copy pages, while the
    device computes. Without a choice all pages would be copied."""
    reads = HostReads(8, heads=4, head_dim=16, value_dim=16, itemsize=4, token_bytes=1024)
    rates = HostRates(to_device=1e8, to_host=1e8, decode=1e9, chunk=2e9)
    attention = HostAttention(reads, rates, max_model_len=8192)
    assert attention.sends_queries(2, 0) and not attention.sends_queries(0, 512)
    host_kv = attention.seconds
    one = problem((0, 0, 0), (1e-3, 0, 0, 1e-6, *[1e12] * 4, 0), prefill_tokens=(512,))
    one = dataclasses.replace(one, lengths=Lengths.of(4 * 1536, [2] * 4), host_kv=host_kv)
    shares = {(kind, tier): float(tier == "device") for kind in KINDS for tier in TIERS}
    shares |= {("kv", "device"): 0.5, ("kv", "host"): 0.5}
    context = 1537
    to_device, to_host, host = reads.seconds(rates, True, 2, 0, context)
    decode_s = max(0.5 * to_device, 0.5 * to_host, 1e-3 + 0.5 * host)
    # The second and third chunk of each prompt.
    prefill_s = 0.5 * 4 * reads.page_bytes(512 + 1024) / rates.to_device
    modelled = 8 * one.seconds(2, 1, shares)
    assert modelled == pytest.approx(prefill_s + 2 * decode_s, rel=1e-3)


def test_nothing_fits():
    with pytest.raises(ConfigError, match=r"offload is 'auto', but no placement fits 100 bytes"):
        problem((100, 0, 0), (*[1e-3] * 4, *[1e6] * 4, 0)).best([1, 2], [1, 2])
