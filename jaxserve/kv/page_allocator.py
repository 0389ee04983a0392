"""Page allocation: the pages that a sequence gets when it is admitted, and while it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxserve.kv.host_pages import HostPages
from jaxserve.kv.layout import KVLayout
from jaxserve.kv.match import Match
from jaxserve.kv.offload.offload_manager import OffloadManager
from jaxserve.kv.page_table import PageTable
from jaxserve.kv.pages import TRASH_PAGE, PagePool
from jaxserve.kv.prefix_cache.node import Node, NodeState
from jaxserve.kv.prefix_cache.node_states import NodeStates


@dataclasses.dataclass
class KVCounters:
    """Device pages copied on write, evicted, and evicted without a copy on a lower tier; and
    preemptions by swap or recompute."""

    copied_pages: int = 0
    evicted_pages: int = 0
    lost_pages: int = 0
    swaps: int = 0
    recomputes: int = 0


class PageAllocator:
    """Gives pages to page tables, those of a match first; evicts cached pages when too few are
    free, and takes back what a table no longer needs while its sequence runs."""

    def __init__(
        self,
        pool: PagePool,
        layout: KVLayout,
        states: NodeStates,
        offload: OffloadManager,
        host_pages: HostPages | None,
        counters: KVCounters,
    ) -> None:
        self._pool, self._layout, self._states = pool, layout, states
        self._offload, self._host_pages, self._counters = offload, host_pages, counters
        self._copies: list[tuple[int, int]] = []
        self._to_host: list[tuple[int, int]] = []

    def pages_for(self, table: PageTable | None, num_tokens: int) -> int:
        """As KVManager.pages_for."""
        if table is not None and table.num_host_pages:
            return self._host_pages.limits.resident(num_tokens)
        return self._layout.pages_for(num_tokens)

    def allocate(self, table: PageTable, match: Match, num_tokens: int) -> None:
        """As KVManager.allocate."""
        for own in table.tables:
            if own.num_host_pages:
                own.host_pages = self._host_pages.allocate(own.num_host_pages)
        if self._layout.windowed:
            return self._allocate_groups(table, match, num_tokens)
        num_pages = self.pages_for(table, num_tokens)
        for node in match.shared:
            self._share(table, node)
        fetched, partial = list(match.fetched), match.partial
        if partial is not None and partial.device is None:
            fetched.append(partial)
        fetches = self._offload.fetch(fetched, len(match.fetched))
        if partial is not None and partial.device is not None:
            self._share_part(table, partial, match.partial_tokens)
        self.unpin_table(table)
        table.pages += self._allocate(num_pages - len(table.pages), table.pages)
        table.num_cached = match.num_tokens
        self._offload.begin_fetches(fetches, table, len(match.shared))

    def extend(self, table: PageTable, start: int, stop: int) -> bool:
        """As KVManager.extend."""
        page_size, num_pages = self._pool.page_size, self._pool.pages_for(stop)
        for group, own in zip(self._layout.groups, table.tables):
            if own.num_host_pages:
                self._transfer_to_host(own, num_pages)
            for index in range(own.num_released, group.first_held(start, page_size)):
                node = own.nodes[index] if index < len(own.nodes) else None
                self._states.release(own.pages[index], node)
                own.pages[index] = TRASH_PAGE
                own.num_released = index + 1
        missing = sum(max(0, num_pages - len(own.pages)) for own in table.tables)
        if missing > self._pool.num_available:
            return False
        for own in table.tables:
            own.pages += self._allocate(num_pages - len(own.pages), own.pages)
        return True

    def evict(self, count: int) -> int:
        """Evicts up to `count` pages that no sequence uses; returns how many."""
        for done in range(count):
            node = self._states.next_to_evict()
            if node is None:
                return done
            self._evict(node)
        return count

    def unpin_table(self, table: PageTable) -> None:
        """Unpins the nodes that a preempted sequence left pinned."""
        self._states.unpin(table.pinned)
        table.pinned = []

    def take_copies(self) -> list[tuple[int, int]]:
        """The pages to copy on the device since the last call, as (source, target)."""
        copies, self._copies = self._copies, []
        return copies

    def take_transfers_to_host(self) -> list[tuple[int, int]]:
        """The pages to copy to the host since the last call, as (device, host)."""
        pairs, self._to_host = self._to_host, []
        return pairs

    def _transfer_to_host(self, table: PageTable, num_pages: int) -> None:
        """Moves the oldest device pages of a table that is to have `num_pages` pages to its host
        pages: the excess over `resident_pages`. Steps already dispatched have written them."""
        stop = num_pages - self._host_pages.limits.resident_pages
        for index in range(table.num_released, stop):
            self._to_host.append((table.pages[index], table.host_pages[index]))
            self._states.release(table.pages[index], None)
            table.pages[index] = TRASH_PAGE
            table.num_released = index + 1

    def _allocate_groups(self, table: PageTable, match: Match, num_tokens: int) -> None:
        """`allocate`, for tables with windows."""
        for own, found in zip(table.tables, match.groups):
            own.nodes, own.num_released = found.nodes[: found.first], found.first
            own.pages = [TRASH_PAGE] * found.first
            for node in found.shared:
                self._share(own, node)
        fetches = [self._offload.fetch(found.fetched, len(found.fetched)) for found in match.groups]
        self.unpin_table(table)
        page_size, max_chunk = self._pool.page_size, self._layout.max_chunk
        for group, own in zip(self._layout.groups, table.tables):
            most = group.most_pages(num_tokens, max_chunk, page_size)
            if own.num_host_pages:
                most = min(most, self._host_pages.limits.resident_pages)
            stop = min(self._pool.pages_for(num_tokens), own.num_released + most)
            own.pages += self._allocate(stop - len(own.pages), own.pages)
            own.num_cached = own.num_matched = match.num_tokens
        for own, found, transfers in zip(table.tables, match.groups, fetches):
            self._offload.begin_fetches(transfers, own, found.first + found.num_shared)

    def _share(self, table: PageTable, node: Node) -> None:
        self._states.use(node)
        table.pages.append(node.device)
        table.nodes.append(node)

    def _share_part(self, table: PageTable, node: Node, num_tokens: int) -> None:
        """Appends a page that holds this node's first `num_tokens` tokens, writable after them:
        the node's own page if it matches whole and no sequence uses it, else a copy."""
        whole = num_tokens == node.num_tokens < self._pool.page_size
        if whole and node.state is NodeState.CACHED:
            self._share(table, node)
            return
        # Allocating the copy may evict the source page: it is read before it is written.
        source = node.device
        table.pages += self._allocate(1, table.pages)
        self._copies.append((source, table.pages[-1]))
        self._counters.copied_pages += 1

    def _allocate(self, count: int, pages: Sequence[int]) -> list[int]:
        """Allocates pages to follow `pages`, evicting cached ones if needed."""
        if count <= 0:
            return []
        self.evict(count - self._pool.num_free)
        return self._pool.allocate(count, pages[-1] if pages else None)

    def _evict(self, node: Node) -> None:
        """Evicts a cached node's device page, saving it first where no tier has it."""
        self._counters.evicted_pages += 1
        if not node.lower:
            if node.keep and self._offload.save(node):
                return
            self._counters.lost_pages += 1
        self._states.transition(node, NodeState.ABSENT)
