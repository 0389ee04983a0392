"""Moves requests between replicas as planned, for as long as a router runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Hashable, Sequence

from jaxserve.cluster.open_requests import OpenRequests
from jaxserve.cluster.policies.moves import Move, begin_moves
from jaxserve.cluster.replicas.routed_replica import RoutedReplica

MOVE_PERIOD_S = 0.2
"""How often moves are planned, if no request is due to leave a replica that prefills."""


async def move_requests(replicas: Sequence[RoutedReplica], requests: OpenRequests) -> None:
    """Move requests between `replicas`, which may change, until cancelled."""
    while True:
        move_once(replicas, requests)
        requests.due.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(requests.due.wait(), MOVE_PERIOD_S)


def move_once(replicas: Sequence[RoutedReplica], requests: OpenRequests) -> None:
    """Begin the moves that are planned now."""

    def movable(index: int, request_id: Hashable) -> bool:
        replica = replicas[index]
        request = replica.requests.get(str(request_id))  # None for one that is on its way there.
        return request is not None and request.movable and not replica.immovable

    def begin(move: Move) -> None:
        request = replicas[move.source].requests[str(move.key)]
        requests.move(request, replicas[move.destination])

    begin_moves([replica.load for replica in replicas], movable, begin)
