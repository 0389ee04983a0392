"""The pages of one lower tier: which are free, and which give way first."""

from __future__ import annotations

from collections import OrderedDict

from jaxserve.kv.prefix_tree import Node
from jaxserve.kv.runs import RunAllocator
from jaxserve.kv.tiers import Tier


class Shelf:
    """Images kept in a tier below the device, least recently used ones giving way to others.

    Those whose node has an image elsewhere too are given up first: nothing is lost with them. Those
    that somebody means to come back to, or that are on the move, are never given up.
    """

    def __init__(self, tier: Tier, num_pages: int) -> None:
        self.tier = tier
        self.num_pages = num_pages
        self._runs = RunAllocator(0, num_pages)
        self._copies: OrderedDict[Node, None] = OrderedDict()
        self._only: OrderedDict[Node, None] = OrderedDict()
        self._last: int | None = None

    @property
    def num_free(self) -> int:
        return self._runs.num_free

    @property
    def num_used(self) -> int:
        return self.num_pages - self._runs.num_free

    @property
    def num_spare(self) -> int:
        """Pages that could be taken at the loss of nothing."""
        return self._runs.num_free + len(self._copies)

    def page(self, node: Node) -> int | None:
        """Where the node's image lies in this tier."""
        return getattr(node, self.tier.value)

    def put(self, node: Node, page: int | None) -> None:
        """Notes where the node's image lies from now on."""
        setattr(node, self.tier.value, page)

    def allocate(self) -> int | None:
        """A free page, that before the one given out last if that can be; None when there is none.

        Pages of a sequence are saved from its tail to its head, and so lie here in its order.
        """
        if not self._runs.num_free:
            return None
        (self._last,) = self._runs.allocate(1, self._last)
        return self._backwards(self._last)

    def free(self, page: int) -> None:
        self._runs.free((self._backwards(page),))

    def _backwards(self, page: int) -> int:
        """The allocator counts pages up, this tier counts the same pages down."""
        return self.num_pages - 1 - page

    def copy_of_another(self, above: Shelf | None = None) -> Node | None:
        """The node whose image here gives way first among those that lie elsewhere too; not on
        `above`, since to make room here for an image from there would win nothing."""
        nodes = (node for node in self._copies if above is None or above.page(node) is None)
        return next(nodes, None)

    def oldest(self, count: int) -> list[Node]:
        """Up to `count` nodes that have their only image here, least recently used first."""
        return [node for node, _ in zip(self._only, range(count))]

    def first(self, node: Node) -> None:
        """Has a node that gives way here at all be the first to."""
        for order in (self._copies, self._only):
            if node in order:
                order.move_to_end(node, last=False)

    def file(self, node: Node) -> None:
        """Puts a node where its state says, as the one used last."""
        self._copies.pop(node, None)
        self._only.pop(node, None)
        if self.page(node) is None or node.moving:
            return
        if sum(page is not None for page in (node.device, node.host, node.disk)) > 1:
            self._copies[node] = None
        elif not node.pins:
            self._only[node] = None
