"""Which running requests move to another replica: from those that fill up, drain, or only prefill.

Freeness and its two thresholds are those of Llumnix (Sun et al., OSDI 2024). A replica that a
request moves to is left above the higher threshold, so that it becomes no source by it: while no
sequence grows, a request moves at most once. Replicas that only prefill are those of DistServe
(Zhong et al., OSDI 2024): while no other has room, a request stays, and so less room is left there
for prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from typing import NamedTuple

from jaxserve.cluster.policies.dispatch import Demand, ReplicaLoad
from jaxserve.core.cluster_status import Role

MOVE_LOW_FREENESS = 1.0
"""A replica whose sequences may grow by fewer pages each gives one up."""

MOVE_HIGH_FREENESS = 3.0
"""A replica takes a request if its sequences may grow by so many pages each after it."""

MAX_MOVES = 4
"""Requests whose KV leaves one replica at a time: it lies in memory meanwhile."""


class Move(NamedTuple):
    """A request, by its key in its replica's load, and the indices of two replicas."""

    key: Hashable
    source: int
    destination: int


def plan_moves(
    loads: Sequence[ReplicaLoad],
    movable: Callable[[int, Hashable], bool] = lambda index, key: True,
) -> list[Move]:
    """The next moves, at most one from each replica and one to each. `movable` tells whether a
    request of a replica can move now.

    The least free replica gives its smallest request, for that costs least, of the lowest priority
    that it has, to the one that is the freest with it, among those of its role. One that drains
    gives all to any with room, and one that prefills gives those with a token to one that decodes;
    then the first without one, of whose prompt pages can be copied while others are computed.
    """
    takers = {index for index, load in enumerate(loads) if not _is_full(load)}
    moves = []
    for source in sorted(range(len(loads)), key=lambda index: loads[index].freeness()):
        load = loads[source]
        if load.num_moving >= MAX_MOVES:
            continue
        for keys, roles, least in _offers(load):
            keys = [key for key in keys if movable(source, key)]
            if not keys:
                continue
            key = min(reversed(keys), key=lambda key: _cost(load, load.demands[key]))
            demand = load.demands[key]
            free = [
                index
                for index in takers - {source}
                if loads[index].role in roles and _takes(loads[index], demand, least)
            ]
            if free:
                destination = max(free, key=lambda index: (loads[index].freeness(demand), -index))
                moves.append(Move(key, source, destination))
                takers.discard(destination)
                break
    return moves


def begin_moves(
    loads: Sequence[ReplicaLoad],
    movable: Callable[[int, Hashable], bool],
    begin: Callable[[Move], None],
) -> None:
    """Plans moves and begins each, until none is left to plan. `begin` counts its request in its
    destination, and in its source as moving unless its prompt is still computed; `movable` is that
    of `plan_moves`."""
    while moves := plan_moves(loads, movable):
        for move in moves:
            begin(move)


def _offers(load: ReplicaLoad) -> Iterator[tuple[list[Hashable], Container[Role], float]]:
    """What should leave a replica, first to last: keys, the roles of who may take them, and the
    freeness that these must be left with."""
    if load.draining:
        yield list(load.demands), ("any", "prefill", "decode"), -math.inf
        return
    prefills = load.role == "prefill"
    if prefills:
        yield [key for key, each in load.demands.items() if each.num_output], ("decode",), -math.inf
        first = [key for key, each in load.demands.items() if not each.num_output][:1]
        yield first, ("decode",), -math.inf
    # What moves already still counts here.
    if not load.num_moving and _is_full(load):
        keys = [k for k, each in load.demands.items() if not (prefills and each.num_output)]
        yield keys, (load.role,), MOVE_HIGH_FREENESS


def _is_full(load: ReplicaLoad) -> bool:
    """Whether requests should leave a replica: it drains, or some wait or soon have to."""
    return load.freeness() < MOVE_LOW_FREENESS or load.num_sequences > load.max_num_seqs


def _takes(load: ReplicaLoad, demand: Demand, least: float) -> bool:
    return load.has_room(demand) and load.freeness(demand) >= least


def _cost(load: ReplicaLoad, demand: Demand) -> tuple[int, int]:
    return -demand.priority, demand.num_pages(load.page_size)
