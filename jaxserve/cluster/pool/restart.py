"""A rolling restart: the process of one replica at a time is replaced, and no request is lost."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence

from jaxserve.cluster.replicas.routed_replica import RoutedReplica
from jaxserve.core.cluster_status import RestartStatus

POLL_S = 0.05

_log = logging.getLogger(__name__)


class RollingRestart:
    """Drains and restarts each of the replicas that there are when it begins.

    Attributes:
        status: how far it is.
    """

    def __init__(
        self, replicas: Sequence[RoutedReplica], route_waiting: Callable[[], object]
    ) -> None:
        """`replicas` may change: one that is given up leaves. `route_waiting` dispatches requests
        that have waited for a replica."""
        self._serving = replicas
        self._replicas = tuple(replicas)
        self._route_waiting = route_waiting
        self.status = RestartStatus(True, 0, len(self._replicas))

    async def run(self) -> None:
        """Restart one after another; ends early, with an error, when one cannot be loaded."""
        for replica in self._replicas:
            error = await self._restart(replica)
            if error is not None:
                _log.error("the rolling restart has ended: %s", error)
                self.status = dataclasses.replace(self.status, running=False, error=error)
                return
            restarted = self.status.num_restarted + 1
            self.status = dataclasses.replace(self.status, num_restarted=restarted)
        self.status = dataclasses.replace(self.status, running=False)

    async def _restart(self, replica: RoutedReplica) -> str | None:
        """Restart one replica; why that could not be done, if so."""
        while not await self._drained(replica):
            if len(self._serving) < 2 or replica.state == "failed":
                return _given_up("a replica")
        if replica.state == "draining":
            replica.end(None)
        while replica.state in ("draining", "loading"):
            await asyncio.sleep(POLL_S)
        if replica.state == "failed":
            return _given_up(f"replica {replica.index}")
        return None

    async def _drained(self, replica: RoutedReplica) -> bool:
        """Once all replicas are ready, drain one: whether it has no request left, or was lost
        meanwhile. False when it serves on, for the others were lost or given up."""
        while any(each.state != "ready" for each in self._serving):
            await asyncio.sleep(POLL_S)
        if len(self._serving) < 2 or replica not in self._serving:
            return False
        _log.info("replica %d drains, to be restarted", replica.index)
        replica.enter("draining")
        while replica.state == "draining" and not replica.is_drained:
            if all(each.state != "ready" for each in self._serving):
                replica.enter("ready")
                self._route_waiting()
                return False
            await asyncio.sleep(POLL_S)
        return True


def _given_up(which: str) -> str:
    return f"{which} could not be loaded again, see the server's log; then restart the server."
