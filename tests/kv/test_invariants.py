"""The invariant checks, on inconsistent state."""

from __future__ import annotations

import contextlib

import pytest
from kv_bench import OTHER, PROMPT, Bench

from jaxserve.kv.invariants import check_invariants
from jaxserve.kv.pages import PageError
from jaxserve.kv.tier import Tier


def leak_a_page(bench: Bench) -> None:
    bench.manager.pool.allocate(1)


def count_twice(bench: Bench) -> None:
    bench.manager.pool.share(bench.samples[0].table.pages[0])


def have_a_page_twice(bench: Bench) -> None:
    first, second = bench.samples[0].table.nodes[:2]
    second.device = first.device


def forget_a_node(bench: Bench) -> None:
    tree, kept = bench.manager.tree, bench.manager.node_states.next_to_evict()
    tree._take_out(kept)


def leak_below(bench: Bench) -> None:
    bench.manager.node_states.tier_pools[Tier.HOST].allocate()


def keep_nothing(bench: Bench) -> None:
    node = next(node for node in bench.manager.tree if node.lower)
    node.lower.clear()


@pytest.mark.parametrize(
    "damage",
    [leak_a_page, count_twice, have_a_page_twice, forget_a_node, leak_below, keep_nothing],
)
def test_the_invariants_notice(tmp_path, damage):
    with contextlib.closing(Bench(tmp_path, page_size=4, host_pages=4)) as bench:
        bench.leave(bench.run(OTHER[:8]))
        bench.manager.evict(1)
        bench.settle()
        sample = bench.run(PROMPT[:8])
        check_invariants(bench.manager, [sample.table])
        damage(bench)
        with pytest.raises(PageError, match="state of the KV manager is inconsistent"):
            check_invariants(bench.manager, [sample.table])
