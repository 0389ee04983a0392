"""How much KV is on its way to one replica at a time.

What comes lies in host memory, as bytes and as pages of the replica that takes it, until it is
written to the devices. However many replicas send, that is a share of the pool at a time. The rest
waits where it is, in pools: requests that move run on there, which leaves less room for others, and
so no more are dispatched to them (the back-pressure of DistServe, Zhong et al., OSDI 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

INCOMING_SHARE = 1 / 8
"""The share of a replica's pages whose KV comes at a time."""


class IncomingKV:
    """KV that comes to one replica: what is on its way, and what waits until there is room.

    Attributes:
        num_pages: of KV that is on its way.
        max_pages: of KV that comes at a time, unless it comes alone.
    """

    def __init__(self, num_pages: int) -> None:
        """`num_pages` are those of the replica's pool."""
        self.num_pages = 0
        self.max_pages = int(INCOMING_SHARE * num_pages)
        self._begun: dict[Hashable, int] = {}
        self._waiting: dict[Hashable, tuple[int, Callable[[], object]]] = {}

    def has_room(self, num_pages: int) -> bool:
        """Whether so many pages could come at once. If they are more than may come at a time, they
        come alone."""
        fits = not self._begun or self.num_pages + num_pages <= self.max_pages
        return fits and not self._waiting

    def enter(self, key: Hashable, num_pages: int, begin: Callable[[], object]) -> None:
        """KV of so many pages will come: `begin` is called once there is room, in the order in
        which they entered. Call `leave` in any case."""
        self._waiting[key] = num_pages, begin
        self._begin()

    def leave(self, key: Hashable) -> None:
        """It has come, or does not come."""
        if self._waiting.pop(key, None) is None:
            self.num_pages -= self._begun.pop(key)
        self._begin()

    def _begin(self) -> None:
        while self._waiting:
            key, (num_pages, begin) = next(iter(self._waiting.items()))
            if self._begun and self.num_pages + num_pages > self.max_pages:
                return
            del self._waiting[key]
            self._begun[key] = num_pages
            self.num_pages += num_pages
            begin()
