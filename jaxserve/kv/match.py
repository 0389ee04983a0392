"""Prefix matching: which tokens of a sequence are cached, and which are worth fetching."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxserve.core.settings.choices import Preemption
from jaxserve.kv.layout import staged_pages
from jaxserve.kv.offload.rates import OffloadRates
from jaxserve.kv.page_table import PageTable
from jaxserve.kv.pages import PagePool
from jaxserve.kv.prefix_cache.node import Node
from jaxserve.kv.prefix_cache.prefix_tree import PrefixTree
from jaxserve.kv.tier import Tier


class GroupMatch(NamedTuple):
    """What is cached of one KV group: the `nodes` of all full pages, of which only those from
    `first` on are needed. The first `num_shared` of these are on the device, the rest below."""

    nodes: list[Node]
    first: int
    num_shared: int

    @property
    def shared(self) -> list[Node]:
        return self.nodes[self.first : self.first + self.num_shared]

    @property
    def fetched(self) -> list[Node]:
        return self.nodes[self.first + self.num_shared :]


@dataclasses.dataclass(frozen=True)
class Match:
    """The cached prefix of a sequence.

    shared: nodes on the device, from the first page on.
    fetched: the nodes after them, on lower tiers.
    partial: a node that begins with the next `partial_tokens` tokens.
    num_tokens: total number of tokens whose KV need not be computed.
    num_in_use: shared pages that are also in use by other sequences, and so cost no free page.
    arriving: the next page is in transfer, and worth waiting for.
    groups: the same nodes by KV group, where there are windows.
    """

    shared: tuple[Node, ...] = ()
    fetched: tuple[Node, ...] = ()
    partial: Node | None = None
    partial_tokens: int = 0
    num_tokens: int = 0
    num_in_use: int = 0
    arriving: bool = False
    groups: tuple[GroupMatch, ...] = ()

    @property
    def must_fetch(self) -> bool:
        """Whether pages must be fetched to the device first."""
        return bool(self.fetched) or (self.partial is not None and self.partial.device is None)


class PrefixMatcher:
    """Matches token sequences against the prefix tree."""

    def __init__(
        self,
        tree: PrefixTree,
        pool: PagePool,
        rates: OffloadRates,
        page_bytes: int,
        preemption: Preemption,
    ) -> None:
        self._tree = tree
        self._pool = pool
        self._rates = rates
        self._page_bytes = page_bytes
        self._preemption = preemption
        # Copying a page for fewer tokens costs more than computing them within a step.
        self._min_partial_tokens = max(1, pool.page_size // 8)

    def match(self, table: PageTable, num_tokens: int) -> Match:
        """Matches the first `num_tokens` tokens of a sequence: consecutive full pages, then the
        page with the longest common prefix with the tokens after them."""
        page_size = self._pool.page_size
        path, parent, missed = self._full_pages(table, num_tokens, lambda node: node.readable)
        if missed is not None and missed.arriving:
            return Match(arriving=True)
        start = len(path) * page_size
        tail = table.tokens(start, min(start + page_size, num_tokens))
        partial, common = self._tree.closest(parent, tail)
        if partial is None or common < self._min_partial_tokens:
            partial, common = None, 0
        elif not partial.readable:
            if partial.arriving:
                return Match(arriving=True)
            partial, common = None, 0
        return self._worthwhile(path, partial, common)

    def known(self, table: PageTable, num_tokens: int) -> tuple[list[Node], int]:
        """The nodes that cache the first `num_tokens` tokens of a sequence on any tier, up to the
        first miss, and how many tokens they cover."""
        page_size = self._pool.page_size
        path, parent, _ = self._full_pages(table, num_tokens, lambda node: node.cached)
        if len(path) < num_tokens // page_size:
            return path, len(path) * page_size
        start = len(path) * page_size
        last, common = self._tree.closest(parent, table.tokens(start, num_tokens))
        if last is None or not last.cached:
            return path, start
        return [*path, last], start + common

    def _full_pages(
        self, table: PageTable, num_tokens: int, usable: Callable[[Node], bool]
    ) -> tuple[list[Node], Node, Node | None]:
        """Nodes of the first full pages, up to the first that is not usable; the last of them, or
        the root; and the node that is not usable, if there is one."""
        page_size = self._pool.page_size
        parent = self._tree.root(table.salt)
        path: list[Node] = []
        for index in range(num_tokens // page_size):
            tokens = table.tokens(index * page_size, (index + 1) * page_size)
            node = self._tree.full(parent, tokens, table.key(index, page_size))
            if node is None or not usable(node):
                return path, parent, node
            path.append(node)
            parent = node
        return path, parent, None

    def _worthwhile(self, path: list[Node], partial: Node | None, common: int) -> Match:
        """The match of a path of full pages, without those cheaper to compute than to fetch."""
        page_size = self._pool.page_size
        split = next((i for i, node in enumerate(path) if node.device is None), len(path))
        shared, fetched = path[:split], path[split:]
        # Device pages after lower-tier pages are rare, and are not matched.
        back = next((i for i, node in enumerate(fetched) if node.device is not None), None)
        if back is not None or (fetched and partial is not None and partial.device is not None):
            fetched, partial, common = fetched[:back], None, 0
        away = fetched + [partial] * (partial is not None and partial.device is None)
        start = split * page_size
        stop = start + len(fetched) * page_size + common
        if away and not self._prefers_fetch(away, start, stop):
            fetched, partial, common = [], None, 0
        return Match(
            tuple(shared),
            tuple(fetched),
            partial,
            common,
            (len(shared) + len(fetched)) * page_size + common,
            sum(self._pool.refs(node.device) > 0 for node in shared),
        )

    def _prefers_fetch(self, nodes: Sequence[Node], start: int, stop: int) -> bool:
        """Whether to fetch these nodes, rather than compute the tokens start .. stop - 1."""
        if self._preemption == "swap":
            return True
        tiers = Counter(node.nearest[0] for node in nodes)
        fetches = [
            (tier, Tier.DEVICE, staged_pages(count) * self._page_bytes)
            for tier, count in tiers.items()
        ]
        return self._rates.prefers_swap(start, stop, fetches)
