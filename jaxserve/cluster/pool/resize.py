"""Another mesh for a replica that serves, in the place of the one that it has.

As Singularity resizes a job (Shukla et al., 2022): between two steps the requests and their KV are
taken from the replica, its process is replaced by one with the other mesh, and they go on there.
KV is stored as no mesh has it, so that it is copied and not computed again, as far as there is room
for it meanwhile.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence

from jaxserve.cluster.kept_kv import KeptKV
from jaxserve.cluster.open_requests import OpenRequests
from jaxserve.cluster.policies.moves import plan_moves
from jaxserve.cluster.replicas.routed_replica import OpenRequest, RoutedReplica
from jaxserve.core.cluster_status import ResizeStatus
from jaxserve.core.errors import ConfigError, EngineClosedError, ReplicaLostError
from jaxserve.core.settings.config import EngineConfig

POLL_S = 0.05

_log = logging.getLogger(__name__)


def resized(
    asked: EngineConfig, now: EngineConfig, sizes: Mapping[str, int], page_size: int
) -> EngineConfig:
    """What was `asked` of a replica, with its parallel sizes of `now` and these others. Raises
    ConfigError for sizes that cannot be, or that it has."""
    names = "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"
    known = {name: getattr(now, name) for name in names}
    if known | sizes == known:
        raise ConfigError(f"the replica has these sizes: {now.sizes}; give others.")
    return dataclasses.replace(asked, **known | sizes, page_size=page_size)


class Resize:
    """Replaces the process of one replica by one with other parallel sizes.

    Requests that others have room for move there first, with their KV. The rest wait until the new
    process has loaded the model, which resumes them; if it cannot be loaded, the one before is.

    Attributes:
        status: how far it is.
    """

    def __init__(
        self,
        replica: RoutedReplica,
        config: EngineConfig,
        replicas: Sequence[RoutedReplica],
        requests: OpenRequests,
    ) -> None:
        """`config`: what the replica is to be loaded with; `replicas` has all, and may change."""
        self._replica = replica
        self._config = config
        self._replicas = replicas
        self._requests = requests
        self._kept: dict[OpenRequest, KeptKV] = {}
        self._resumed = asyncio.Event()
        self.status = ResizeStatus(True, replica.index, config.sizes, 0, 0.0)

    async def run(self) -> None:
        """Until the replica serves again."""
        try:
            await self._run()
        finally:
            self._kept.clear()  # Some may have ended while the replica was loaded.

    async def _run(self) -> None:
        replica, begin_s = self._replica, time.monotonic()
        _log.info("replica %d is resized to %s", replica.index, self._config.sizes)
        replica.enter("draining")
        while replica.state == "draining" and self._are_leaving():
            await asyncio.sleep(POLL_S)
        if replica.state == "draining":
            replica.immovable = True
            await self._keep()
        if replica.state != "draining":
            self._end(
                "it was lost meanwhile, see the server's log; resize it again once it is ready."
            )
            return
        before, replica.config = replica.config, self._config
        replica.fallback, replica.resume = before, self._resume
        replica.end(None)
        while replica.state != "failed" and not self._resumed.is_set():
            await asyncio.sleep(POLL_S)
        took_s = time.monotonic() - begin_s
        self.status = dataclasses.replace(self.status, took_s=took_s)
        if replica.state == "failed":
            self._end("it cannot be loaded again, see the server's log; then restart the server.")
        elif replica.config is self._config:
            self._end(None)
        else:
            self._end("it failed to load; its previous sizes are restored. See the server's log.")

    def _are_leaving(self) -> bool:
        """Whether requests of the replica are moving to others, or can move there."""
        replica = self._replica
        if replica.moved or any(request.moving for request in replica.requests.values()):
            return True

        def movable(index: int, key: Hashable) -> bool:
            request = replica.requests.get(str(key))
            here = self._replicas[index] is replica
            return here and request is not None and (request.movable or not request.accepted)

        return bool(plan_moves([each.load for each in self._replicas], movable))

    def _end(self, error: str | None) -> None:
        if error is not None:
            _log.error("replica %d was not resized: %s", self._replica.index, error)
        self.status = dataclasses.replace(self.status, running=False, error=error)

    async def _keep(self) -> None:
        """Take the KV of the requests that the replica has, as far as there is room for it: of the
        longest first, which take longest to compute again. They run on until its process ends."""
        replica, requests = self._replica, self._replica.requests
        try:
            room = await replica.client.max_kept_bytes()
            for name in sorted(requests, key=lambda name: -requests[name].routed.num_tokens):
                request = requests.get(name)  # None for one that has ended meanwhile.
                if request is None or not request.movable:
                    continue
                kept = self._kept[request] = KeptKV(request)
                await kept.take(replica, name, room)
                room -= kept.num_bytes
                num_cut = self.status.num_cut + kept.cut
                self.status = dataclasses.replace(self.status, num_cut=num_cut)
        except (ReplicaLostError, EngineClosedError):
            return  # Its updates say so too.

    async def _resume(self, left: Iterable[OpenRequest]) -> None:
        """The replica is loaded again, and the requests that it had go on there."""
        for request in left:
            kept = self._kept.pop(request, None)
            if await self._requests.resume_in(self._replica, request, kept):
                num_kept = self.status.num_kept + 1
                self.status = dataclasses.replace(self.status, num_kept=num_kept)
        self._resumed.set()
