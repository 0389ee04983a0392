"""Copies the KV of a request from one replica to another in stages, while it runs on."""

from __future__ import annotations

import asyncio
import logging

from jaxserve.cluster.policies.copies import CopyCounts, CopyStages
from jaxserve.cluster.replicas.routed_replica import OpenRequest, RoutedReplica
from jaxserve.cluster.tasks import unless
from jaxserve.core.errors import EngineClosedError, ReplicaLostError, RequestError

COPY_S = 60.0
"""How long one stage may take; if it takes longer, the request stays."""

POLL_S = 0.002
"""How often the first token of a prompt is looked for whose KV has been copied."""

_log = logging.getLogger(__name__)


class StagedCopy:
    """The copy of one request, which counts in its source as moving until `run` ends; but while its
    prompt is computed it does not count.

    It ends, also within a stage, when its request does, or its destination is not ready any more.
    No two copies wait for each other's memory. A stage takes room on its destination's host for
    the tokens that it is asked for, brings no more, and gives it back before the next one asks.
    Pages of the destination's pool are counted for the whole request when its move begins, and
    those that a stage does not find free are not waited for: it brings nothing then, and the
    destination computes what is missing.

    Attributes:
        num_left: tokens generated since the last stage, without the newest, which has no KV yet.
    """

    def __init__(
        self,
        request: OpenRequest,
        destination: RoutedReplica,
        name: str,
        page_size: int,
        counts: CopyCounts,
    ) -> None:
        """`name`: what it will be called in its destination."""
        assert request.replica is not None
        self._request = request
        self._source, self._sent_as, self._left = request.replica, request.sent_as, request.left
        self._destination, self._load, self._name = destination, destination.load, name
        self._source_load = request.replica.load
        self._stages = CopyStages(
            len(request.routed.added.token_ids),
            page_size,
            counts,
            during_prefill=self._source_load.role == "prefill" and not request.routed.begun,
        )
        self._source_load.num_moving += not self._stages.during_prefill

    @property
    def num_left(self) -> int:
        return max(0, self._request.routed.num_tokens - 1 - self._stages.num_staged)

    @property
    def is_wanted(self) -> bool:
        """Whether the request is still in its source, and can go to its destination."""
        here = self._source.requests.get(self._sent_as) is self._request
        ready = self._destination.load is self._load and not self._load.draining
        return here and ready and not self._request.routed.aborted

    async def run(self) -> bool:
        """Copy until little is left; False if that did not work."""
        try:
            await self._during_prefill()
            while self.is_wanted and self._stages.goes_on(self.num_left):
                await self._stage(self._request.routed.num_tokens)
        except (ReplicaLostError, EngineClosedError, RequestError):
            return False  # A replica is lost, which it says itself, or the request has just ended.
        except Exception as error:
            self._request.immovable = True
            _log.warning("a request stays in replica %d: %r", self._source.index, error)
            return False
        finally:
            self._source_load.num_moving -= not self._stages.during_prefill
        return True

    async def _during_prefill(self) -> None:
        """Copy pages as they are computed, until the prompt has its first token."""
        stages = self._stages
        if not stages.during_prefill:
            return
        while self.is_wanted and not self._request.routed.begun:
            if stages.wanted is None:
                await asyncio.sleep(POLL_S)
            else:
                computed = self._source.client.computed(self._sent_as, stages.wanted)
                stop = await unless((self._left, self._destination.unready), computed)
                if stop is not None:
                    await self._stage(stop)
        stages.during_prefill = False
        self._source_load.num_moving += 1

    async def _stage(self, stop: int) -> None:
        """Copy the KV computed since the last stage, and before token `stop`, once there is room
        for it."""
        stage = self._stages.next(stop, self._request.routed.num_unfinished)

        async def copy() -> int:
            async with asyncio.timeout(COPY_S):
                return await self._source.client.stage_in(
                    self._destination.client, self._sent_as, self._name, stage.start, stop
                )

        num_staged = await self._destination.receive(self._name, stage.num_pages, copy, self._left)
        if num_staged is not None:
            self._stages.staged(num_staged)
