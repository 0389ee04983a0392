"""Responses kept in memory: the most recently used ones of each API key."""

from __future__ import annotations

import collections

from jaxserve.protocol.errors import ResponseNotFoundError
from jaxserve.protocol.responses_api.stored import StoredResponse

MAX_RESPONSES = 1024
MAX_BYTES = 64 << 20
"""Total size of stored responses, as JSON with their conversations."""

MAX_RESPONSE_BYTES = 8 << 20
"""Size of one, which the next request of its conversation reads."""


class ResponseStore:
    """Stored responses by tenant and id. For one event loop.

    When there are too many, or too many bytes, the tenant with the most of them loses its least
    recently used one, so that no client can make those of the others forgotten.
    """

    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_response_bytes = max_response_bytes
        self._stored: dict[str | None, collections.OrderedDict[str, StoredResponse]] = {}

    def add(self, tenant: str | None, stored: StoredResponse) -> bool:
        """Keep a response, in the place of one with its id. False if it is too large; then that
        one is forgotten too."""
        if stored.num_bytes > self._max_response_bytes:
            if self._stored.get(tenant, {}).pop(stored.id, None) is not None:
                self._forget_if_empty(tenant)
            return False
        mine = self._stored.setdefault(tenant, collections.OrderedDict())
        mine[stored.id] = stored
        mine.move_to_end(stored.id)
        self._make_room()
        return True

    def get(self, tenant: str | None, response_id: str) -> StoredResponse:
        """Raises ResponseNotFoundError for one that is not stored, or is another tenant's."""
        mine = self._stored.get(tenant, {})
        if response_id not in mine:
            raise ResponseNotFoundError(response_id)
        mine.move_to_end(response_id)
        return mine[response_id]

    def delete(self, tenant: str | None, response_id: str) -> None:
        """Raises ResponseNotFoundError as `get` does."""
        if self._stored.get(tenant, {}).pop(response_id, None) is None:
            raise ResponseNotFoundError(response_id)
        self._forget_if_empty(tenant)

    def _make_room(self) -> None:
        while True:
            counts = {tenant: len(stored) for tenant, stored in self._stored.items()}
            sizes = {
                tenant: sum(each.num_bytes for each in stored.values())
                for tenant, stored in self._stored.items()
            }
            if sum(counts.values()) > self._max_responses:
                largest = max(counts, key=counts.__getitem__)
            elif sum(sizes.values()) > self._max_bytes:
                largest = max(sizes, key=sizes.__getitem__)
            else:
                return
            self._stored[largest].popitem(last=False)
            self._forget_if_empty(largest)

    def _forget_if_empty(self, tenant: str | None) -> None:
        if not self._stored[tenant]:
            del self._stored[tenant]
