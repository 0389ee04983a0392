"""What the KV manager shares, keeps and gives up."""

from __future__ import annotations

import pytest
from kv_bench import OTHER, PROMPT
from kv_world import Sample

from jaxserve.kv.tier import Tier

# Finding


@pytest.mark.parametrize("length", range(1, 13))
def test_a_hit_leaves_one_token_to_compute(make, length):
    bench = make()
    bench.leave(bench.run(PROMPT[:length]))
    assert bench.hit(PROMPT[:length]) == length - 1
    assert bench.hit(PROMPT) == length


@pytest.mark.parametrize("chunk", range(1, 10))
def test_only_what_is_written_is_found_wherever_chunks_and_pages_end(make, chunk):
    bench = make()
    sample = bench.start(PROMPT)
    for stop in range(chunk, len(PROMPT) + chunk, chunk):
        bench.write(sample, chunk)
        stop = min(stop, len(PROMPT))
        assert sample.num_computed == stop
        bench.manager.cache_pages(sample.table, stop)
        assert bench.hit([*PROMPT, 0]) == stop // 4 * 4
        assert len(sample.table.nodes) == stop // 4
    bench.manager.cache_pages(sample.table, 18, partial=True)
    assert bench.hit([*PROMPT, 0]) == 20


@pytest.mark.parametrize("common", range(14))
def test_what_is_common_is_found_to_the_token(make, common):
    bench = make()
    bench.leave(bench.run(PROMPT[:13]))
    assert bench.hit(PROMPT[:common] + OTHER) == common


def test_few_tokens_of_a_large_page_are_sooner_computed_than_copied(make):
    bench = make(page_size=16, num_pages=5)
    bench.leave(bench.run(PROMPT))
    assert bench.hit(PROMPT[:1] + OTHER) == 0
    assert bench.hit(PROMPT[:2] + OTHER) == 2
    assert bench.hit(PROMPT[:17] + OTHER) == 16


def test_salts_share_nothing(make):
    bench = make()
    bench.leave(bench.run(PROMPT, b"ours"))
    assert bench.hit(PROMPT, b"theirs") == bench.hit(PROMPT) == 0
    assert bench.hit(PROMPT, b"ours") == 19


# Sharing


def test_full_pages_are_shared_with_running_sequences(make):
    bench = make()
    first = bench.run(PROMPT[:12])
    used = bench.manager.pool.num_used
    match = bench.manager.match(Sample(PROMPT[:14]).table, 13)
    assert match.num_in_use == len(match.shared) == 3
    second = bench.run(PROMPT[:14])
    assert second.table.pages[:3] == first.table.pages
    assert bench.manager.pool.num_used == used + 1
    assert bench.manager.counters.copied_pages == 0


def test_an_unused_partial_page_is_reused_in_place(make):
    bench = make()
    first = bench.run(PROMPT[:6])
    pages = list(first.table.pages)
    bench.leave(first)
    second = bench.start(PROMPT[:8])
    assert second.table.pages == pages and second.num_computed == 6
    assert bench.manager.counters.copied_pages == 0
    bench.write(second)
    bench.manager.cache_pages(second.table, 8)
    assert bench.hit(PROMPT) == 8
    assert len(bench.manager.tree) == 2  # The node has grown.


@pytest.mark.parametrize("why", ["in use", "it goes on otherwise", "it is full"])
def test_it_is_copied_when_to_write_on_would_harm_another(make, why):
    bench = make()
    length = 8 if why == "it is full" else 6
    first = bench.run(PROMPT[:length], partial=True)
    pages = list(first.table.pages)
    if why != "in use":
        bench.leave(first)
    common = 6 if why == "in use" else 5
    second = bench.start(PROMPT[:common] + OTHER[:5])
    assert second.num_computed == common
    assert second.table.pages[0] == pages[0] and second.table.pages[1] != pages[1]
    assert bench.manager.counters.copied_pages == 1
    bench.write(second)
    assert bench.hit([*PROMPT[:length], 0]) == length


def test_one_copy_for_each_sample_of_a_prompt_and_no_more(make):
    bench = make()
    samples = [bench.run(PROMPT[:10], partial=True)]
    samples += [bench.start(PROMPT[:10]) for _ in range(3)]
    assert [sample.num_computed for sample in samples] == [10, 9, 9, 9]
    assert bench.manager.counters.copied_pages == 3
    assert bench.manager.pool.num_used == 2 + 4
    for number, sample in enumerate(samples):
        sample.token_ids += [number] * 5
        bench.write(sample)
        bench.manager.cache_pages(sample.table, 15)
    assert bench.manager.counters.copied_pages == 3
    assert bench.manager.pool.num_used == 2 + 2 * 4


def test_a_page_is_copied_even_if_it_must_give_way_to_its_copy(make):
    bench = make(num_pages=4)
    bench.leave(bench.run(PROMPT[:12]))
    sample = bench.start(PROMPT[:10] + OTHER[:2])
    assert sample.num_computed == 10  # The step has compared what it reads.
    assert bench.manager.pool.num_used == 3


def test_pages_computed_twice_become_one(make):
    bench = make()
    first, second = bench.start(PROMPT[:10]), bench.start(PROMPT[:10])
    assert bench.manager.pool.num_used == 6
    for sample in (first, second):
        bench.write(sample)
        bench.manager.cache_pages(sample.table, 10)
    assert first.table.pages[:2] == second.table.pages[:2]
    assert bench.manager.pool.num_used == 4
    assert len(bench.manager.operations().freed) == 2


def test_reset_clears_the_cache_but_running_sequences_keep_their_pages(make):
    bench = make(host_pages=8)
    bench.leave(bench.run(OTHER))
    bench.manager.evict(2)
    sample = bench.run(PROMPT[:10])
    bench.manager.reset()
    assert bench.hit(PROMPT) == bench.hit(OTHER) == 0
    assert bench.manager.pool.num_free == 16 - 3
    sample.token_ids += PROMPT[10:]
    bench.write(sample)
    bench.manager.cache_pages(sample.table, len(PROMPT))
    assert bench.hit(PROMPT) == 0  # What follows a page that is not known cannot be.
    bench.leave(sample)
    assert bench.manager.pool.num_free == 16


# Giving up


def test_tails_give_way_before_heads_and_the_oldest_first(make):
    bench = make()
    old, new = bench.run(OTHER[:8]), bench.run(PROMPT[:12])
    bench.leave(old)
    bench.leave(new)
    hits = []
    for evicted in (1, 1, 1, 1, 1, 0):
        hits.append((bench.hit(OTHER[:9]), bench.hit(PROMPT[:13])))
        assert bench.manager.evict(1) == evicted
    assert hits == [(8, 12), (4, 12), (0, 12), (0, 8), (0, 4), (0, 0)]
    assert bench.manager.counters.evicted_pages == 5


def test_to_be_shared_is_to_be_used(make):
    bench = make()
    for token_ids in (PROMPT[:8], OTHER[:8]):
        bench.leave(bench.run(token_ids))
    bench.leave(bench.run(PROMPT[:9]))
    bench.manager.evict(2)
    assert (bench.hit(PROMPT[:9]), bench.hit(OTHER[:9])) == (8, 0)


def test_a_page_in_use_is_never_given_up(make):
    bench = make(num_pages=6)
    bench.leave(bench.run(OTHER[:8]))
    sample = bench.run(PROMPT[:12])
    assert bench.manager.evict(100) == 2
    assert bench.manager.pool.num_cached == 0
    assert bench.manager.extend(sample.table, 12, 20)
    assert not bench.manager.extend(sample.table, 12, 21) and len(sample.table.pages) == 5
    assert not bench.manager.fits(bench.manager.match(Sample(OTHER).table, 3), 1, 0)
    # Pages that others use cost nothing.
    match = bench.manager.match(Sample(PROMPT).table, 12)
    assert bench.manager.fits(match, 12, 0) and not bench.manager.fits(match, 13, 0)


def test_the_pinned_are_given_up_last_and_once_unpinned_in_their_turn(make):
    bench = make()
    samples = {name: bench.run([name] * 8) for name in range(4)}
    pinned, group = samples[0].table.nodes[:], samples[1].table.nodes[:]
    bench.manager.pin(pinned)
    bench.manager.pin(group)
    for sample in samples.values():
        bench.leave(sample)
    bench.manager.unpin(group)
    order = []
    for _ in range(8):
        before = {name: bench.hit([name] * 9) for name in range(4)}
        bench.manager.evict(1)
        order += [name for name in range(4) if bench.hit([name] * 9) < before[name]]
    assert order == [2, 2, 3, 3, 1, 1, 0, 0]
    bench.manager.unpin(pinned)


@pytest.mark.parametrize("keep", [True, False])
def test_what_is_not_worth_keeping_is_not_saved(make, keep):
    bench = make(host_pages=8)
    bench.leave(bench.run(PROMPT[:8]), keep=keep)
    bench.manager.evict(2)
    bench.settle()
    assert bench.manager.transfer_counters.saved_pages == ({Tier.HOST: 2} if keep else {})
    assert bench.manager.counters.lost_pages == (0 if keep else 2)
    assert bench.hit(PROMPT[:9]) == (8 if keep else 0)


def test_a_page_that_another_preempted_sequence_needs_is_saved(make):
    bench = make(host_pages=8)
    first, second = bench.run(PROMPT[:8]), bench.run(PROMPT[:9])
    bench.leave(first, pin=True)
    bench.leave(second, keep=False)
    bench.manager.evict(3)
    bench.settle()
    assert bench.manager.transfer_counters.saved_pages == {Tier.HOST: 2}


def test_without_prefix_caching_pages_are_kept_for_preempted_sequences(make):
    bench = make(prefix_caching=False, host_pages=8)
    bench.leave(bench.run(PROMPT[:8], b"one"))
    assert bench.manager.pool.num_free == 16
    sample = bench.run(PROMPT[:8], b"two")
    bench.leave(sample, pin=True)
    assert bench.manager.pool.num_cached == 2
    bench.manager.evict(1)
    bench.settle()
    bench.come_back(sample)
    assert sample.num_computed == 7
    bench.write(sample)
    bench.leave(sample, pin=True)
    bench.manager.unpin_table(sample.table)
    bench.settle()
    assert bench.manager.pool.num_free == 16
    assert bench.manager.tiers[Tier.HOST].num_used == 0
