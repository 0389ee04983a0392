"""Adds and removes replicas while a router runs, as an `Autoscaler` decides."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

from jaxserve.cluster.policies.autoscale import Autoscaler
from jaxserve.cluster.policies.dispatch import ReplicaLoad
from jaxserve.cluster.replicas.routed_replica import RoutedReplica
from jaxserve.core.cluster_status import ScalingStatus

SCALE_PERIOD_S = 0.5
POLL_S = 0.05

_log = logging.getLogger(__name__)


class Scaling:
    """Has one replica added at a time, or drains one and has it removed.

    Attributes:
        status: the bounds, and what has been done so far.
    """

    def __init__(
        self,
        policy: Autoscaler,
        replicas: Sequence[RoutedReplica],
        add: Callable[[], bool],
        may_change: Callable[[], bool],
        route_waiting: Callable[[], object],
    ) -> None:
        """`replicas` change: by `add`, which begins to load one more unless there is none, and when
        one that is `removing` has ended. Nothing is changed unless `may_change`. `route_waiting`
        dispatches requests that have waited for a replica."""
        self._policy = policy
        self._replicas = replicas
        self._add = add
        self._may_change = may_change
        self._route_waiting = route_waiting
        self.status = ScalingStatus(policy.min_replicas, policy.max_replicas, 0, 0)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(SCALE_PERIOD_S)
            if not self._may_change():
                continue
            decision = self._policy.decide(self._loads(), time.monotonic())
            if decision == "add":
                if self._add():
                    added = self.status.num_added + 1
                    self.status = dataclasses.replace(self.status, num_added=added)
            elif decision is not None and await self._removed(self._replicas[decision.replica]):
                removed = self.status.num_removed + 1
                self.status = dataclasses.replace(self.status, num_removed=removed)

    async def _removed(self, replica: RoutedReplica) -> bool:
        """Drain a replica, from which its requests move, and wait for its end. False when it serves
        on, because the others fill up or are lost meanwhile."""
        _log.info("replica %d drains, to be removed", replica.index)
        replica.enter("draining")
        replica.removing = True
        while replica.state == "draining":
            others = [each for each in self._replicas if each.state == "ready"]
            if self._policy.are_full([each.load for each in others]):
                _log.info("replica %d serves again", replica.index)
                replica.removing = False
                replica.enter("ready")
                self._route_waiting()
                return False
            if replica.is_drained:
                break
            await asyncio.sleep(POLL_S)
        replica.end(None)
        while replica in self._replicas:
            await asyncio.sleep(POLL_S)
        return True

    def _loads(self) -> list[ReplicaLoad]:
        return [replica.load for replica in self._replicas]
