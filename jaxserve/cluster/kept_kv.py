"""KV of a request that is kept while the process of its replica is replaced."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

from jaxserve.cluster.policies.copies import pieces
from jaxserve.cluster.replicas.routed_replica import OpenRequest, RoutedReplica
from jaxserve.cluster.staged_copy import COPY_S
from jaxserve.core.errors import EngineClosedError, ReplicaLostError, RequestError

_log = logging.getLogger(__name__)


class KeptKV:
    """The exported KV of one request, from its first token on.

    It is in pieces, each of as many pages as may come to a replica at a time, which are taken and
    staged one by one: neither process has more of it in its memory than that.

    Attributes:
        num_bytes: of the KV.
        cut: whether there was no room for more.
    """

    def __init__(self, request: OpenRequest) -> None:
        self.num_bytes = 0
        self.cut = False
        self._request = request
        self._pieces: deque[tuple[int, Any]] = deque()
        """How many pages each has at most, and the piece as its client has exported it."""

    async def take(self, replica: RoutedReplica, name: str, max_bytes: int) -> None:
        """Take it from the replica where the request is `name`, up to `max_bytes`; the request runs
        on there. A piece that fails ends this, and what came before stays. Raises ReplicaLostError
        and EngineClosedError."""
        try:
            await self._take(replica, name, max_bytes)
        except (ReplicaLostError, EngineClosedError):
            raise
        except RequestError:
            pass  # It has just ended.
        except Exception as error:
            _log.warning("KV of a request is computed again: %r", error)

    async def _take(self, replica: RoutedReplica, name: str, max_bytes: int) -> None:
        routed, load = self._request.routed, replica.load
        for span in pieces(
            len(routed.added.token_ids),
            routed.num_tokens,
            load.page_size,
            routed.num_unfinished,
            load.incoming_kv.max_pages,
        ):
            room = max_bytes - self.num_bytes
            async with asyncio.timeout(COPY_S):
                num_bytes, piece = await replica.client.keep_request(
                    name, span.start, span.stop, room
                )
            if num_bytes > room:
                self.cut = True
                return
            self.num_bytes += num_bytes
            self._pieces.append((span.num_pages, piece))

    async def stage(self, replica: RoutedReplica, name: str) -> int:
        """Stage it as `name` in a replica that is loaded again, and free it; returns how many
        tokens have their KV there, and 0 when any of it failed: give up what came then."""
        num_tokens = 0
        try:
            while self._pieces:
                num_staged = await self._stage_next(replica, name)
                if num_staged is None:
                    return 0  # The request has ended, or the replica is lost.
                # Of several sequences the shortest may have all of its KV before the others.
                if num_staged <= num_tokens and self._request.routed.num_unfinished == 1:
                    break  # There is no room, or no more was computed.
                num_tokens = num_staged
        except Exception as error:
            _log.warning("KV of a request is computed again: %r", error)
            return 0
        finally:
            self._pieces.clear()
        return num_tokens

    async def _stage_next(self, replica: RoutedReplica, name: str) -> int | None:
        num_pages, piece = self._pieces.popleft()

        async def stage() -> int:
            async with asyncio.timeout(COPY_S):
                return await replica.client.stage_request(piece, name)

        return await replica.receive(name, num_pages, stage, self._request.left)
