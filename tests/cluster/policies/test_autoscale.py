"""When replicas are added and removed: within bounds, in time, and never back and forth."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from test_dispatch import PAGE, demand_of, loads, prompt
from test_migration import carry_out

from jaxserve.cluster.policies.autoscale import ADD_AFTER_S, REMOVE_AFTER_S, Autoscaler, Removal
from jaxserve.cluster.policies.dispatch import Demand, ReplicaLoad, dispatch
from jaxserve.cluster.policies.moves import plan_moves

PAGES, SLOTS = 60, 8


def replica() -> ReplicaLoad:
    return ReplicaLoad(PAGES, PAGE, SLOTS)


def test_a_burst_adds_none_and_a_load_that_stays_adds_one():
    scaler, replicas = Autoscaler(1, 3), [replica()]
    for key in range(SLOTS + 1):
        replicas[0].add(key, demand_of(prompt(key)))
    assert scaler.decide(replicas, 10) is None
    assert scaler.decide(replicas, 10 + ADD_AFTER_S / 2) is None
    replicas[0].remove(0)
    assert scaler.decide(replicas, 10 + ADD_AFTER_S) is None
    replicas[0].add(0, demand_of(prompt(0)))
    assert scaler.decide(replicas, 20) is None
    assert scaler.decide(replicas, 20 + ADD_AFTER_S) == "add"
    replicas.append(replica())
    replicas[1].draining = True  # It is being loaded.
    assert scaler.decide(replicas, 100) is None
    replicas[1].draining = False
    assert scaler.decide(replicas, 200) is None


def test_sequences_that_fill_the_pools_add_one_up_to_the_most():
    scaler, replicas = Autoscaler(1, 2, add_after_s=0), [replica()]
    replicas[0].add("long", demand_of(prompt(0, PAGES * PAGE - 4)))
    assert scaler.decide(replicas, 0) == "add"
    replicas.append(replica())
    replicas[1].add("too", demand_of(prompt(1, PAGES * PAGE - 4)))
    assert scaler.decide(replicas, 1) is None


def test_the_least_used_is_removed_after_a_while():
    scaler, replicas = Autoscaler(1, 4), loads(3, PAGES, SLOTS)
    replicas[0].add("a", demand_of(prompt(0)))
    replicas[2].add("b", demand_of(prompt(1)))
    assert scaler.decide(replicas, 0) is None
    assert scaler.decide(replicas, REMOVE_AFTER_S) == Removal(1)
    del replicas[1]
    assert scaler.decide(replicas, REMOVE_AFTER_S + 1) is None
    assert scaler.decide(replicas, 3 * REMOVE_AFTER_S) == Removal(1)
    del replicas[1]
    for later in range(5):
        assert scaler.decide(replicas, (4 + later) * REMOVE_AFTER_S) is None


def test_fewer_than_the_least_are_made_up_for():
    scaler = Autoscaler(2, 3)
    assert scaler.decide([replica()], 0) is None
    assert scaler.decide([replica()], ADD_AFTER_S) == "add"


demands = st.builds(
    lambda num_tail, num_sequences, num_output: Demand((), num_tail, num_sequences, num_output),
    st.integers(1, 5 * PAGE),
    st.integers(1, 2),
    st.integers(0, 5 * PAGE),
)


def settle(replicas: list[ReplicaLoad]) -> None:
    while moves := plan_moves(replicas):
        carry_out(replicas, moves)


@given(st.lists(demands, max_size=60), st.integers(1, 3), st.integers(0, 4), st.data())
def test_a_static_load_settles(requests, least, more, data):
    """From any number of replicas; what a removed one could not move is dispatched again."""
    most = least + more
    replicas = [replica() for _ in range(data.draw(st.integers(least, most), "replicas"))]
    for key, demand in enumerate(requests):
        replicas[dispatch(replicas, demand)].add(key, demand)
    scaler, done = Autoscaler(least, most), []
    for second in range(0, 60 * (most + 2), 2):
        settle(replicas)
        decision = scaler.decide(replicas, second)
        if decision == "add":
            replicas.append(replica())
        elif decision is not None:
            leaving = replicas[decision.replica]
            leaving.draining = True
            settle(replicas)
            assert scaler.decide(replicas, second) is None
            replicas.remove(leaving)
            for key, demand in leaving.demands.items():
                replicas[dispatch(replicas, demand)].add(key, demand)
        if decision is not None:
            done.append("add" if decision == "add" else "remove")
        assert least <= len(replicas) <= most
    assert len(set(done)) < 2, "it adds or removes, and does not do both"
    assert sum(len(load.demands) for load in replicas) == len(requests)
