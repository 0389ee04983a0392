"""Where requests are dispatched: by cached prefixes, freeness and drain; deterministic."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.cluster.policies.dispatch import Demand, ReplicaLoad, dispatch
from jaxserve.cluster.policies.prefixes import CachedPrefixes, page_hashes

PAGE = 4


def loads(count=2, num_pages=100, max_num_seqs=8):
    return [ReplicaLoad(num_pages, PAGE, max_num_seqs) for _ in range(count)]


def demand_of(token_ids, num_sequences=1, tenant=None, priority=0):
    hashes = page_hashes(token_ids, PAGE, tenant, None)
    num_tail = len(token_ids) - PAGE * len(hashes)
    return Demand(hashes, num_tail, num_sequences, priority=priority)


def prompt(first, length=12):
    return [first, *range(100, 100 + length - 1)]


def test_hashes_are_of_full_pages_and_all_before_them():
    hashes = page_hashes(range(11), PAGE, None, None)
    assert len(hashes) == 2
    assert page_hashes(range(8), PAGE, None, None) == hashes
    assert page_hashes(range(8), PAGE, None, None, known=hashes[:1]) == hashes
    assert page_hashes([0, 1, 2, 3, 9, 9, 9, 9], PAGE, None, None)[0] == hashes[0]
    other = page_hashes([9, 1, 2, 3, 4, 5, 6, 7], PAGE, None, None)
    assert not set(other) & set(hashes)


def test_tenants_and_salts_have_no_page_in_common():
    names = [(None, None), ("a", None), (None, "a"), ("a", "a"), ("a, a", None)]
    assert len({page_hashes(range(8), PAGE, *name)[0] for name in names}) == len(names)


def test_without_a_prefix_cache_samples_alone_share_pages():
    load = loads()[0]
    load.add("a", Demand.of(2 * PAGE + 1, None, PAGE, 3))
    load.add("b", Demand.of(2 * PAGE + 1, None, PAGE))
    assert load.num_used_pages == load.num_pages_to_move == 2 + 3 + 2 + 1
    assert not len(load.cached)


def test_requests_spread_while_nothing_is_cached():
    replicas = loads(3)
    places = []
    for key in range(6):
        demand = demand_of(prompt(key))
        places.append(dispatch(replicas, demand))
        replicas[places[-1]].add(key, demand)
    assert places == [0, 1, 2, 0, 1, 2]


def test_a_cached_prefix_attracts_until_its_replica_is_busier():
    replicas, shared = loads(max_num_seqs=100), list(range(40))
    replicas[1].add("first", demand_of(shared))
    places = []
    for key in range(60):
        demand = demand_of([*shared, 1000 + key, 0, 0, 0])
        places.append(dispatch(replicas, demand))
        replicas[places[-1]].add(key, demand)
    assert places[0] == 1
    assert 0 in places, "the other replica would idle"
    assert abs(places.count(0) - places.count(1)) <= 20


def test_a_prefix_stays_cached_after_its_request():
    replicas, demand = loads(), demand_of(prompt(1))
    replicas[1].add("it", demand)
    replicas[1].remove("it")
    assert dispatch(replicas, demand) == 1
    replicas[1].cached.clear()
    assert dispatch(replicas, demand) == 0


def test_the_oldest_pages_are_forgotten_and_of_a_prefix_the_last():
    cached = CachedPrefixes(3)
    first, second = (page_hashes(prompt(i, 8), PAGE, None, None) for i in (1, 2))
    cached.add(first)
    cached.add(second)
    assert (cached.match(first), cached.match(second)) == (1, 2)


def test_freeness_is_the_pages_that_each_sequence_may_grow_by():
    (load,) = loads(1, num_pages=20)
    assert load.freeness() == 20
    load.add("a", demand_of(prompt(1)))  # three full pages, and one to grow into
    assert (load.virtual_usage(), load.freeness()) == (4, 16)
    load.add("b", demand_of(prompt(1), num_sequences=2))  # the same three, and two of its own
    assert (load.virtual_usage(), load.freeness()) == (6, 14 / 3)
    load.grow("a", 5)
    assert load.virtual_usage() == 7
    load.grow("b", 10)  # five tokens each
    assert load.virtual_usage() == 9
    load.remove("a")
    load.remove("b")
    assert (load.virtual_usage(), load.num_sequences) == (0, 0)


def test_a_high_priority_has_headroom():
    """Half of a pool stays free beside it while another replica has room, and no longer."""
    replicas, high = loads(num_pages=20), demand_of(prompt(1), priority=-1)
    assert dispatch(replicas, high) == 0
    replicas[0].add("high", high)
    assert (replicas[0].virtual_usage(), replicas[0].num_used_pages) == (4 + 10, 4)
    replicas[0].add("higher", demand_of([7], priority=-9))  # Both have the same headroom.
    assert (replicas[0].virtual_usage(), replicas[0].freeness()) == (5 + 10, 2.5)
    places = []
    for key in range(8):
        demand = demand_of(prompt(1 if key == 6 else 2 + key))  # One has its prefix cached there.
        places.append(dispatch(replicas, demand))
        replicas[places[-1]].add(key, demand)
    assert places == [1, 1, 1, 1, 0, 1, 0, 0]
    replicas[0].remove("high")
    replicas[0].remove("higher")
    assert replicas[0].virtual_usage() == replicas[0].num_used_pages


def test_without_room_the_freest_gets_it():
    replicas = loads(num_pages=10, max_num_seqs=2)
    for load, count in zip(replicas, (3, 2)):
        for key in range(count):
            load.add(key, demand_of([1, 2]))
    assert not any(load.has_room(demand_of([1, 2])) for load in replicas)
    assert dispatch(replicas, demand_of([1, 2])) == 1


def test_a_draining_replica_gets_nothing():
    replicas, demand = loads(), demand_of(prompt(1))
    replicas[0].add("it", demand)
    replicas[0].draining = True
    assert replicas[0].virtual_usage() == math.inf
    assert dispatch(replicas, demand) == 1
    replicas[1].draining = True
    assert dispatch(replicas, demand) is None
    replicas[0].draining = False
    assert dispatch(replicas, demand) == 0


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=14)
events = st.lists(
    st.tuples(prompts, st.integers(1, 3), st.integers(0, 30), st.booleans()), max_size=30
)


@given(events)
def test_any_session_balances_and_repeats(session):
    """`virtual_usage` is counted as requests come and go: it must be what they add up to."""

    def run():
        replicas, open_, places = loads(num_pages=30, max_num_seqs=4), {}, []
        for key, (token_ids, num_sequences, num_tokens, ends) in enumerate(session):
            demand = demand_of(token_ids, num_sequences)
            place = dispatch(replicas, demand)
            places.append(place)
            replicas[place].add(key, demand)
            replicas[place].grow(key, num_tokens)
            open_[key] = place, demand, num_tokens
            if ends:
                oldest = next(iter(open_))
                replicas[open_.pop(oldest)[0]].remove(oldest)
            for place, load in enumerate(replicas):
                here = [each for each in open_.values() if each[0] == place]
                shared = {page for _, demand, _ in here for page in demand.hashes}
                own = sum(demand.grown(tokens).own_pages(PAGE) for _, demand, tokens in here)
                assert load.virtual_usage() == len(shared) + own
                assert load.num_sequences == sum(demand.num_sequences for _, demand, _ in here)
                assert len(load.cached) <= load.num_pages
        return places

    assert run() == run()
