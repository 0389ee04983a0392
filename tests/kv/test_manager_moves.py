"""What the KV manager saves below the device and brings back, and moves that fail."""

from __future__ import annotations

import pytest
from kv_bench import OTHER, PROMPT, Bench
from kv_world import Sample

from jaxserve.kv.invariants import check_invariants
from jaxserve.kv.layout import TRANSFER_PAGES
from jaxserve.kv.tier import Tier

# Out and back


def swapped_out(bench: Bench, length: int) -> Sample:
    """A sequence all of whose pages have gone to the host's memory."""
    sample = bench.run(PROMPT[:length])
    bench.leave(sample, pin=True)
    bench.manager.evict(bench.manager.pool.capacity)
    bench.settle()
    return sample


def test_out_and_back(make):
    bench = make(host_pages=8)
    sample = swapped_out(bench, 18)
    assert bench.manager.pool.num_free == 16
    assert bench.manager.match(sample.table, 17).must_fetch
    bench.come_back(sample)
    assert sample.num_computed == 17  # The step has compared what it reads.
    counters = bench.manager.transfer_counters
    assert counters.saved_pages == counters.fetched_pages == {Tier.HOST: 5}


def test_the_second_time_out_copies_only_what_is_new(make):
    bench = make(host_pages=16)
    sample = swapped_out(bench, 16)
    for length in (18, 20):
        bench.come_back(sample)
        sample.token_ids = PROMPT[:length]
        bench.write(sample)
        bench.leave(sample, pin=True)
        bench.manager.evict(16)
        bench.settle()
    # Four pages, then the fifth with two tokens, then the fifth again with four.
    assert bench.manager.transfer_counters.saved_pages == {Tier.HOST: 4 + 1 + 1}
    bench.come_back(sample)
    assert sample.num_computed == 19


def test_what_is_on_the_move_is_worth_waiting_for(make):
    bench = make(host_pages=8)
    bench.leave(bench.run(PROMPT[:8]))
    bench.manager.evict(2)
    waiting = Sample(PROMPT[:9])
    assert bench.manager.match(waiting.table, 8).arriving  # on its way out
    bench.settle()
    assert not bench.manager.match(waiting.table, 8).arriving
    first = bench.start(PROMPT[:9])
    assert first.fetching
    assert bench.manager.match(waiting.table, 8).arriving  # on its way in
    bench.settle()
    assert bench.manager.match(waiting.table, 8).num_in_use == 2


def test_an_abandoned_transfer_delays_no_sequence(make):
    bench = make(host_pages=8)
    sample = swapped_out(bench, 8)
    assert bench.take(sample) is not None
    bench.step()
    bench.begin_move(0)
    bench.manager.release(sample.table, 0)
    bench.samples.remove(sample)
    match = bench.manager.match(Sample(PROMPT[:9]).table, 8)
    assert not match.arriving and match.num_tokens == 0
    bench.settle()
    assert bench.hit(PROMPT[:9]) == 8


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_fetch_makes_the_prefix_shorter(make, failing):
    bench = make(page_size=1, num_pages=24, host_pages=24)
    sample = swapped_out(bench, 20)
    assert bench.take(sample) is not None
    bench.step()
    assert sample.table.num_cached == 19 and len(bench.manager._offload.fetches(sample.table)) == 2
    for number in range(2):
        if bench.startable:
            bench.begin_move(0)
            bench.end_move(0, fails=15 * (number == failing))
            bench.poll(0)
            bench.step()
    assert not bench.manager.is_fetching(sample.table)
    assert sample.num_computed == failing * TRANSFER_PAGES
    assert bench.manager.transfer_counters.failed_transfers == 1
    bench.write(sample)
    assert sample.num_computed == 20
    check_invariants(bench.manager, [sample.table])


def test_a_fetch_that_takes_too_long_is_given_up(make):
    bench = make(host_pages=8)
    sample = swapped_out(bench, 8)
    assert bench.take(sample) is not None
    bench.step()
    bench.begin_move(0)
    bench.poll(31)
    assert not bench.manager.is_fetching(sample.table) and not sample.fetching
    assert sample.num_computed == 0
    assert bench.manager.transfer_counters.slow_transfers == 1
    bench.write(sample)
    bench.settle()  # It comes late, and is dropped.
    bench.check_readable(sample)


def test_a_page_that_the_disk_has_changed_is_computed_again(make):
    bench = make(disk_pages=8)
    sample = swapped_out(bench, 8)
    bench.corrupt(next(iter(bench.manager.tree)).lower[Tier.DISK])
    bench.come_back(sample)
    assert sample.num_computed == 0
    assert bench.manager.transfer_counters.failed_transfers == 1
    bench.write(sample)
    bench.leave(sample)
    bench.manager.evict(2)
    bench.settle()
    assert bench.hit(PROMPT[:9]) == 8


@pytest.mark.parametrize("reason", ["no room below", "no staging buffer", "the medium refuses"])
def test_what_cannot_be_saved_is_lost_and_nothing_else(make, reason):
    host_pages = 2 if reason == "no room below" else 24
    bench = make(page_size=1, num_pages=24, host_pages=host_pages, staging_buffers=1)
    bench.leave(bench.run(PROMPT[:18]))
    bench.manager.evict(18)
    bench.step()
    bench.begin_move(0)
    bench.end_move(0, fails=15 * (reason == "the medium refuses"))
    bench.settle()
    saved = bench.manager.transfer_counters.saved_pages.get(Tier.HOST, 0)
    assert saved == {"no room below": 2, "no staging buffer": TRANSFER_PAGES}.get(reason, 0)
    assert bench.manager.tiers[Tier.HOST].num_used == saved
    sample = bench.run(PROMPT[:19])
    assert sample.num_computed == 19


def test_what_lies_behind_a_page_that_went_away_is_left_for_later(make):
    bench = make(host_pages=8)
    sample = swapped_out(bench, 8)
    bench.come_back(sample)
    bench.write(sample)
    bench.manager.cache_pages(sample.table, 8)
    head, tail = sample.table.nodes[:1], sample.table.nodes[1:]
    bench.manager.pin(tail)  # What no engine does: it pins a prefix from its head on.
    bench.leave(sample)
    bench.manager.evict(1)
    bench.manager.unpin(tail)
    match = bench.manager.match(Sample(PROMPT).table, 19)
    assert match.fetched == tuple(head) and match.num_tokens == 4
    again = bench.run(PROMPT)
    assert again.num_computed == 20


def test_what_is_being_fetched_does_not_give_way_to_what_is_saved(make):
    bench = make(num_pages=3, host_pages=2)
    bench.leave(bench.run(PROMPT[:8]))
    bench.manager.evict(2)
    bench.settle()
    bench.leave(bench.run(OTHER[:8]))
    sample = bench.start(PROMPT[:8])
    for _ in range(len(bench.startable)):  # Saves first, if there were any.
        bench.begin_move(1)
        bench.end_move(0, 0)
    bench.settle()
    assert sample.num_computed == 7
    bench.check_readable(sample)
    assert bench.manager.counters.lost_pages == 2


def test_a_tail_whose_other_copy_gives_way_still_goes_before_its_head(make):
    bench = make(host_pages=2)
    sample = swapped_out(bench, 8)
    bench.leave(bench.run(OTHER[:4]))
    sample.token_ids.append(0)
    bench.come_back(sample)
    head, tail = sample.table.nodes
    assert None not in (head.device, tail.device) and head.lower and tail.lower
    bench.leave(sample)
    bench.manager.evict(1)  # That of the other, whose copy takes the room of one of these.
    assert bool(head.lower) != bool(tail.lower)
    bench.settle()
    bench.manager.evict(1)
    assert tail.device is None and head.device is not None


# From the host's memory on to a disk


def test_a_quarter_of_the_hosts_pages_could_always_be_taken(make):
    bench = make(page_size=1, host_pages=16, disk_pages=32)
    bench.leave(bench.run(PROMPT[:16]))
    bench.manager.evict(16)
    bench.step()
    bench.begin_move(0)
    bench.end_move(0, 0)
    for _ in range(5):
        bench.poll(0)  # However often it looks while they are on the way.
    bench.settle()
    host, disk = bench.manager.node_states.tier_pools.values()
    assert (host.num_used, host.num_spare, disk.num_used) == (16, 4, 4)
    assert bench.hit(PROMPT[:17]) == 16


def test_from_the_disk_to_the_device(make):
    bench = make(page_size=1, host_pages=4, disk_pages=32)
    for start in range(0, 16, 2):
        bench.leave(bench.run([start, start + 1]))
        for _ in range(2):
            bench.manager.evict(1)
            bench.settle()
    for start in range(0, 16, 2):
        assert bench.hit([start, start + 1, 0]) == 2
    sample = bench.start([0, 1, 2])
    bench.settle()
    assert sample.num_computed == 2
    assert bench.manager.transfer_counters.fetched_pages[Tier.DISK] == 2


@pytest.mark.parametrize("disk_pages", [1, 2, 8])
def test_moves_come_to_rest_however_small_the_disk(make, disk_pages):
    bench = make(page_size=1, host_pages=16, disk_pages=disk_pages)
    for start in range(0, 60, 10):
        bench.leave(bench.run(list(range(start, start + 10))))
        bench.manager.evict(10)
        bench.settle()
    host, disk = bench.manager.node_states.tier_pools.values()
    assert disk.num_used == disk_pages
    assert host.num_spare == min(4, disk_pages)


# Which way to preempt


@pytest.mark.parametrize("preemption", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("transfer_us", [10, 1000])
def test_preempted_the_cheaper_way_or_as_told(make, preemption, transfer_us):
    bench = make(host_pages=8, preemption=preemption)
    rates = bench.manager.rates
    rates.prefilled(8, 36, 100)
    for ends in ((Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE)):
        rates.transferred(*ends, 64, transfer_us)
    sample = bench.run(PROMPT[:8])
    swaps = bench.manager.prefers_swap(sample.table, 8)
    assert swaps == {"swap": True, "recompute": False, "auto": transfer_us == 10}[preemption]
    counters = bench.manager.counters
    assert (counters.swaps, counters.recomputes) == (swaps, not swaps)


def test_there_is_no_swapping_without_a_tier_below(make):
    bench = make(preemption="swap")
    assert not bench.manager.prefers_swap(bench.run(PROMPT[:8]).table, 8)


def test_what_is_sooner_computed_than_fetched_is_not_fetched(make):
    bench = make(host_pages=8, preemption="auto")
    rates = bench.manager.rates
    rates.transferred(Tier.HOST, Tier.DEVICE, 64, 50)
    sample = swapped_out(bench, 12)
    assert bench.hit(PROMPT[:13]) == 12
    for _ in range(20):
        rates.prefilled(8, 36, 1)
    assert bench.hit(PROMPT[:13]) == 0
    assert bench.take(sample).num_tokens == 0
    assert bench.manager.pool.num_cached == 0
    bench.step()
