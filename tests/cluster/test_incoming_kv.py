"""KV that comes to one replica from however many others takes a share of its host's memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from test_simulated import deployment, replica

from jaxserve.cluster.policies.incoming_kv import INCOMING_SHARE, IncomingKV
from jaxserve.cluster.simulated import SimulatedCluster
from jaxserve.core.requests.sampling_params import SamplingParams
from jaxserve.metrics.fluidity import INTERACTIVE
from jaxserve.simulator.simulation import Arrival


def test_what_has_no_room_waits_for_its_turn():
    incoming, begun = IncomingKV(round(10 / INCOMING_SHARE)), []

    def enter(key: str, num_pages: int) -> None:
        incoming.enter(key, num_pages, lambda: begun.append(key))

    assert incoming.has_room(11)
    enter("long", 11)  # It comes alone.
    assert begun == ["long"] and not incoming.has_room(1)
    enter("a", 6)
    enter("gone", 4)
    enter("b", 5)
    enter("c", 1)
    incoming.leave("gone")
    assert begun == ["long"]
    incoming.leave("long")
    assert begun == ["long", "a"]  # `c` has room, and comes after `b`.
    assert not incoming.has_room(1)
    incoming.leave("a")
    assert begun == ["long", "a", "b", "c"] and incoming.num_pages == 6
    assert incoming.has_room(4) and not incoming.has_room(5)


@given(st.lists(st.tuples(st.integers(0, 14), st.integers(0, 5)), max_size=30))
def test_all_come_in_turn_and_few_at_a_time(session):
    """Each enters, and then some leave, on their way or waiting."""
    incoming, begun, gone = IncomingKV(round(10 / INCOMING_SHARE)), [], set()
    for key, (num_pages, leaver) in enumerate(session):
        incoming.enter(key, num_pages, lambda key=key: begun.append(key))
        if key - leaver >= 0 and key - leaver not in gone:
            incoming.leave(key - leaver)
            gone.add(key - leaver)
        here = [each for each in begun if each not in gone]
        assert incoming.num_pages == sum(session[each][0] for each in here)
        assert incoming.num_pages <= 10 or len([each for each in here if session[each][0]]) == 1
        assert here or len(gone) == key + 1  # Something comes while anything waits.
    while left := [each for each in begun if each not in gone]:
        incoming.leave(left[0])
        gone.add(left[0])
    assert begun == sorted(begun) and gone == set(range(len(session))) and not incoming.num_pages


def test_a_decode_replica_takes_few_requests_of_many_prefill_replicas_at_a_time():
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    arrivals = [Arrival(number * 1000, [number + 1] * 8, params) for number in range(24)]
    cluster = SimulatedCluster(deployment(), lambda: replica(deployment()), 5, num_prefill=4)
    coming, seen = cluster._present[4].load.incoming_kv, []
    cluster._every(0.001, lambda: seen.append((coming.num_pages, len(coming._waiting))))
    cluster.serve(arrivals)
    assert all(summary.output_tokens == 20 for summary in cluster.summaries(INTERACTIVE))
    assert cluster.num_moved and coming.num_pages == 0
    most = int(INCOMING_SHARE * 60)
    assert most - 3 < max(num_pages for num_pages, _ in seen) <= most  # of three pages each
    assert max(num_waiting for _, num_waiting in seen) > 1
