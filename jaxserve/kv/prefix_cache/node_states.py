"""The one owner of the state of nodes, and of all that follows from a change of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from jaxserve.kv.pages import PageError, PagePool
from jaxserve.kv.prefix_cache.node import ON_DEVICE, TRANSITIONS, Node, NodeState
from jaxserve.kv.prefix_cache.prefix_tree import PrefixTree
from jaxserve.kv.prefix_cache.tier_pool import TierPool
from jaxserve.kv.tier import Tier


class NodeStates:
    """Changes the state of nodes, their references, pins and copies on lower tiers.

    Every change is complete when the call returns: the node has its place in the eviction order of
    each tier, pages that nothing refers to are free, and a node without KV has left the tree.
    """

    def __init__(
        self, pool: PagePool, tree: PrefixTree, tiers: Mapping[Tier, int], prefix_caching: bool
    ) -> None:
        """`tiers` gives the number of pages of each tier below the device, from the top down.
        Without `prefix_caching`, only pinned nodes keep their KV when no sequence uses it."""
        self.tier_pools = {tier: TierPool(tier, num_pages) for tier, num_pages in tiers.items()}
        self._pool = pool
        self._tree = tree
        self._prefix_caching = prefix_caching
        self._evictable: OrderedDict[Node, None] = OrderedDict()
        self._evictable_pinned: OrderedDict[Node, None] = OrderedDict()
        self._freed: list[int] = []

    # Queries

    def evictable(self) -> list[Node]:
        """The nodes whose device pages can be evicted, in the order in which they would be."""
        return [*self._evictable, *self._evictable_pinned]

    def next_to_evict(self) -> Node | None:
        """The first of `evictable`: the least recently used, unpinned ones before pinned ones."""
        order = self._evictable or self._evictable_pinned
        return next(iter(order), None)

    def take_freed(self) -> list[int]:
        """The device pages freed since the last call."""
        freed, self._freed = self._freed, []
        return freed

    # Changes

    def transition(self, node: Node, state: NodeState, page: int | None = None) -> None:
        """Changes a node's state; `page` is the device page that comes with IN_USE.

        A CACHED node that becomes IN_USE keeps its page, and one that becomes SAVING or ABSENT
        frees it. An IN_USE node that becomes ABSENT has passed its page on to another node.
        Raises PageError for a transition that TRANSITIONS does not allow.
        """
        before = node.state
        if state not in TRANSITIONS[before]:
            raise PageError(f"a KV node cannot go from {before.name} to {state.name}")
        if before is NodeState.CACHED and state is not NodeState.IN_USE:
            self._free(node.device)
        node.state = state
        if page is not None:
            node.device = page
        elif state not in ON_DEVICE:
            node.device = None
        self._apply(node)

    def use(self, node: Node) -> None:
        """Adds a sequence's reference to a node's device page."""
        self._pool.share(node.device)
        node.keep = True
        if node.state is NodeState.CACHED:
            self.transition(node, NodeState.IN_USE)
        else:
            self._apply(node)

    def release(self, page: int, node: Node | None, *, keep: bool = True) -> None:
        """Drops a sequence's reference to a device page, `node`'s if it has one. A page without
        references is cached if it has a node, else freed. Without `keep`, this sequence does not
        need it saved when it is evicted."""
        if node is not None:
            node.keep = keep or node.pins > 0 or self._pool.refs(page) > 1
        if self._pool.drop(page):
            return
        if node is None:
            self._free(page)
        else:
            self.transition(node, NodeState.CACHED)

    def pin(self, node: Node, count: int = 1) -> None:
        """Adds `count` pins to a node; -1 removes one."""
        node.pins += count
        self._apply(node)

    def unpin(self, nodes: Sequence[Node]) -> None:
        """Removes one pin of each node, given in the order of a prefix."""
        for node in reversed(nodes):
            self.pin(node, -1)

    def store(self, node: Node, tier: Tier, page: int) -> None:
        """Gives a node in transfer its page on a lower tier; the end of the transfer follows."""
        node.lower[tier] = page

    def discard(self, node: Node, tier: Tier) -> None:
        """Frees a node's copy on a lower tier, if there is one."""
        self._discard(node, tier)
        self._apply(node)

    def begin_spill(self, node: Node) -> None:
        """Marks that a node is being copied from one lower tier to the next."""
        node.spilling = True
        self._apply(node)

    def end_spill(self, node: Node, retry: Tier | None = None) -> None:
        """Ends a copy between lower tiers. If it failed, `retry` is the tier that it was to leave:
        the node is still the first to go there."""
        node.spilling = False
        self._apply(node)
        if retry is not None:
            self.tier_pools[retry].first(node)

    def reset(self) -> None:
        """Detaches every node of the tree."""
        for node in self._tree.clear():
            self._apply(node)

    # Consequences

    def _apply(self, node: Node) -> None:
        """What follows from a node's fields: eviction orders, free pages, the shape of the tree."""
        keeps = node.attached and (self._prefix_caching or node.pins > 0)
        if node.state is NodeState.CACHED and not keeps:
            return self.transition(node, NodeState.ABSENT)
        order = None
        if node.state is NodeState.CACHED:
            order = self._evictable_pinned if node.pins else self._evictable
        for other in (self._evictable, self._evictable_pinned):
            if other is not order:
                other.pop(node, None)
        if order is not None:
            order.setdefault(node)  # Keep an existing place: heads stay behind their tails.
        # A copy below is only worth its page while the node may be matched or is on the device.
        if not keeps and not (node.attached and node.device is not None) and not node.moving:
            for tier in tuple(node.lower):
                self._discard(node, tier)
        for tier_pool in self.tier_pools.values():
            tier_pool.update_lru(node)
        self._tree.prune(node)

    def _discard(self, node: Node, tier: Tier) -> None:
        page = node.lower.pop(tier, None)
        if page is not None:
            self.tier_pools[tier].free(page)

    def _free(self, page: int) -> None:
        self._pool.free(page)
        self._freed.append(page)
