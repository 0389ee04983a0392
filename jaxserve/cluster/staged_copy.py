"""Copies the KV of a request from one replica to another in stages, while it runs on.

Each stage copies the KV computed since the one before, as in the live migration of Llumnix (Sun et
al., OSDI 2024); what little is left when the request moves, its new replica computes. Where
replicas only prefill, as in DistServe (Zhong et al., OSDI 2024), the full pages of a prompt's first
chunks are copied while later chunks are computed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging

from jaxserve.cluster.policies.migration import LAST_TOKENS, MAX_STAGES
from jaxserve.cluster.replicas.routed_replica import OpenRequest, RoutedReplica
from jaxserve.core.errors import EngineClosedError, ReplicaLostError, RequestError

COPY_S = 60.0
"""How long one stage may take; if it takes longer, the request stays."""

POLL_S = 0.002
"""How often the first token of a prompt is looked for whose KV has been copied."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class CopyCounts:
    """Tokens of all requests that were copied.

    Attributes:
        copied: whose KV was copied to another replica.
        during_prefill: of those, whose KV was copied while later ones of their prompt were
            computed.
        left: of requests that moved, those whose KV the new replica has to compute.
    """

    copied: int = 0
    during_prefill: int = 0
    left: int = 0


class StagedCopy:
    """The copy of one request.

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
        self._source, self._sent_as = request.replica, request.sent_as
        self._destination, self._load, self._name = destination, destination.load, name
        self._page_size = page_size
        self._counts = counts
        self._num_staged = 0

    @property
    def num_left(self) -> int:
        return max(0, self._request.routed.num_tokens - 1 - self._num_staged)

    @property
    def is_wanted(self) -> bool:
        """Whether the request is still in its source, and can go to its destination."""
        here = self._source.requests.get(self._sent_as) is self._request
        ready = self._destination.load is self._load and not self._load.draining
        return here and ready and not self._request.routed.aborted

    async def run(self) -> bool:
        """Copy until little is left; False if that did not work."""
        try:
            if self._source.load.role == "prefill" and not self._request.routed.begun:
                await self._during_prefill()
            self._source.num_moving += 1
            try:
                await self._during_decode()
            finally:
                self._source.num_moving -= 1
        except (ReplicaLostError, EngineClosedError, RequestError):
            return False  # A replica is lost, which it says itself, or the request has just ended.
        except Exception as error:
            self._request.immovable = True
            _log.warning("a request stays in replica %d: %r", self._source.index, error)
            return False
        return True

    async def _during_prefill(self) -> None:
        """Copy pages as they are computed, until the prompt has its first token."""
        request = self._request.routed
        num_prompt, wanted = len(request.added.token_ids), self._page_size
        while self.is_wanted and not request.begun and self._num_staged < num_prompt:
            await self._source.client.computed(self._sent_as, min(wanted, num_prompt))
            if not self.is_wanted:
                return
            num_copied = await self._stage()
            if self._num_staged < num_prompt:
                self._counts.during_prefill += num_copied
            if wanted >= num_prompt:
                break
            # Where there is no room for more, the rest comes when all of it is computed.
            wanted = self._num_staged + self._page_size if num_copied else num_prompt
        while self.is_wanted and not request.begun:
            await asyncio.sleep(POLL_S)

    async def _during_decode(self) -> None:
        for _ in range(MAX_STAGES):
            if not self.is_wanted or (self._num_staged and self.num_left <= LAST_TOKENS):
                return
            if not await self._stage():
                return

    async def _stage(self) -> int:
        """Copy the KV computed since the last stage; returns its number of tokens."""
        before = self._num_staged
        async with asyncio.timeout(COPY_S):
            self._num_staged = await self._source.client.stage_in(
                self._destination.client, self._sent_as, self._name, before
            )
        num_copied = max(0, self._num_staged - before)
        self._counts.copied += num_copied
        return num_copied
