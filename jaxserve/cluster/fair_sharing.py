"""Exchanges tenant counters between the queues of replicas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from jaxserve.cluster.policies.fairness import FairShares
from jaxserve.cluster.replicas.routed_replica import RoutedReplica
from jaxserve.core.errors import EngineClosedError, ReplicaLostError

SHARE_PERIOD_S = 0.2
"""How far counters are behind: by what replicas serve in this time."""


async def share_fairly(replicas: Sequence[RoutedReplica]) -> None:
    """Exchange the counters of tenants between `replicas`, which may change, until cancelled. One
    that does not answer does not delay the others."""
    shares = FairShares()
    asked: dict[RoutedReplica, asyncio.Task[None]] = {}
    async with asyncio.TaskGroup() as exchanges:
        while True:
            loaded = [replica for replica in replicas if replica.state != "loading"]
            shares.keep({replica.index for replica in loaded})
            asked = {replica: task for replica, task in asked.items() if not task.done()}
            for replica in loaded:
                if replica not in asked:
                    asked[replica] = exchanges.create_task(_exchange(shares, replica))
            await asyncio.sleep(SHARE_PERIOD_S)


async def _exchange(shares: FairShares, replica: RoutedReplica) -> None:
    with contextlib.suppress(ReplicaLostError, EngineClosedError):  # Its updates say so too.
        shares.exchange(replica.index, *await replica.client.exchange_shares(dict(shares.counters)))
