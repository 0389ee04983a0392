"""The page pool of one offload tier, with its eviction order."""

from __future__ import annotations

from collections import OrderedDict

from jaxserve.kv.extents import ExtentAllocator
from jaxserve.kv.prefix_cache.node import Node
from jaxserve.kv.tier import Tier


class TierPool:
    """Pages of one tier below the device, evicted least recently used first.

    Pages of nodes that also have a copy on another tier are evicted first, since that loses no KV.
    The only copy of a pinned node is never evicted, nor any page of a node in transfer.
    """

    def __init__(self, tier: Tier, num_pages: int) -> None:
        self.tier = tier
        self.num_pages = num_pages
        self._extents = ExtentAllocator(0, num_pages)
        self._copies: OrderedDict[Node, None] = OrderedDict()
        self._only: OrderedDict[Node, None] = OrderedDict()
        self._last: int | None = None

    @property
    def num_free(self) -> int:
        return self._extents.num_free

    @property
    def num_used(self) -> int:
        return self.num_pages - self._extents.num_free

    @property
    def num_spare(self) -> int:
        """Pages that are free or evictable without losing an only copy."""
        return self._extents.num_free + len(self._copies)

    def allocate(self) -> int | None:
        """A free page, or None; preferably the one before the page allocated last.

        A sequence's pages are saved from tail to head, so its pages end up in ascending order.
        """
        if not self._extents.num_free:
            return None
        (self._last,) = self._extents.allocate(1, self._last)
        return self._backwards(self._last)

    def free(self, page: int) -> None:
        self._extents.free((self._backwards(page),))

    def _backwards(self, page: int) -> int:
        """Maps the allocator's ascending page numbers to this tier's descending ones."""
        return self.num_pages - 1 - page

    def copy_of_another(self, above: TierPool | None = None) -> Node | None:
        """The first node to evict among those that also have a copy on another tier. Nodes with a
        copy on `above` are skipped: spilling from `above` into their page gains no capacity."""
        nodes = (node for node in self._copies if above is None or above.tier not in node.lower)
        return next(nodes, None)

    def oldest(self, count: int) -> list[Node]:
        """Up to `count` nodes whose only copy is in this tier, least recently used first."""
        return [node for node, _ in zip(self._only, range(count))]

    def first(self, node: Node) -> None:
        """Moves an evictable node to the front of its eviction order."""
        for order in (self._copies, self._only):
            if node in order:
                order.move_to_end(node, last=False)

    def update_lru(self, node: Node) -> None:
        """Puts a node in the eviction order that its state requires, as most recently used."""
        self._copies.pop(node, None)
        self._only.pop(node, None)
        if self.tier not in node.lower or node.moving:
            return
        if node.device is not None or len(node.lower) > 1:
            self._copies[node] = None
        elif not node.pins:
            self._only[node] = None
