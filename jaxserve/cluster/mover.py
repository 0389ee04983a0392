"""Begins the moves that are planned, for as long as a router runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Hashable, Sequence

from jaxserve.cluster.open_requests import OpenRequests
from jaxserve.cluster.policies.migration import Move, begin_moves
from jaxserve.cluster.replicas.routed_replica import RoutedReplica

PERIOD_S = 0.2
"""How often moves are planned, if no request is due to leave a replica that prefills."""


async def move_requests(replicas: Sequence[RoutedReplica], requests: OpenRequests) -> None:
    """Move requests between `replicas`, which may change, until cancelled."""
    while True:
        _begin_moves(replicas, requests)
        requests.due.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(requests.due.wait(), PERIOD_S)


def _begin_moves(replicas: Sequence[RoutedReplica], requests: OpenRequests) -> None:
    def movable(index: int, key: Hashable) -> bool:
        replica = replicas[index]
        request = replica.requests.get(str(key))  # None for one that is on its way there.
        return request is not None and request.movable and not replica.immovable

    def begin(move: Move) -> None:
        request = replicas[move.source].requests[str(move.key)]
        requests.move(request, replicas[move.destination])

    begin_moves([replica.load for replica in replicas], movable, begin)
