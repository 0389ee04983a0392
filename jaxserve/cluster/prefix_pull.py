"""Carries out pulls of prefixes from one replica to another, and measures them."""

from __future__ import annotations

import asyncio
import logging
import time

from jaxserve.cluster.policies.pulls import Pull, Pulls
from jaxserve.cluster.replicas.routed_replica import OpenRequest, RoutedReplica
from jaxserve.core.errors import EngineClosedError, ReplicaLostError

PULL_S = 5.0
"""How long a prefix may take from one replica to another; after that it is computed."""

_log = logging.getLogger(__name__)


class PrefixPull:
    """A prefix that one replica has, and another one may pull before it gets a request. It
    counts in its source until `run` ends."""

    def __init__(
        self,
        source: RoutedReplica,
        destination: RoutedReplica,
        pull: Pull,
        page_size: int,
        pulls: Pulls,
    ) -> None:
        self._source = source
        self._destination = destination
        self._pull = pull
        self._page_size = page_size
        self._pulls = pulls
        self._load = source.load
        self._load.num_pulled += 1

    async def run(self, request: OpenRequest) -> None:
        """Pull the prefix of a request, if that takes less time than computing it. If it fails, the
        request computes its prompt as any other does. It ends early when the request does, or its
        destination is not ready any more."""
        try:
            async with asyncio.timeout(PULL_S):
                await self._run(request)
        except (ReplicaLostError, EngineClosedError):
            pass  # Its updates say so too.
        except Exception as error:  # Also TimeoutError: it hangs.
            self._pulls.failed()
            places = f"{self._source.index} to {self._destination.index}"
            _log.warning("a prefix is computed, it did not come from replica %s: %r", places, error)
        finally:
            self._load.num_pulled -= 1

    async def _run(self, request: OpenRequest) -> None:
        pull, pulls, source = self._pull, self._pulls, self._source.client
        start, stop = pull.span(self._page_size)
        compute_us = await self._destination.client.prefill_us(start, stop)
        has_room = self._destination.load.incoming_kv.has_room(pull.num_pages)
        if not has_room or not pulls.pays(pull.num_pages, compute_us):
            return
        added, begin_s = request.routed.added, time.monotonic()
        num_tokens = await self._destination.receive(
            self,
            pull.num_pages,
            lambda: source.pull_to(
                self._destination.client, added.token_ids[:stop], added.tenant, added.cache_salt
            ),
            request.left,
        )
        if num_tokens is not None:
            us = round(1e6 * (time.monotonic() - begin_s))
            pulls.pulled(pull, num_tokens, self._page_size, us)
