"""KV cache manager: page ownership, prefix caching, eviction and transfers between tiers.

The prefix tree implements all sharing and all swapping. Sequences with a common prefix share its
pages, whether they are samples of one prompt, beams, turns of a conversation or unrelated requests.
Pages of a finished or preempted sequence stay in the tree until they are evicted; evicted pages
are offloaded to host memory and then to disk, if these tiers are configured, or dropped. On
admission, a sequence's tokens with cached KV are not recomputed: a preempted sequence whose pages
were offloaded and fetched back has been swapped (as in vLLM, Kwon et al. 2023, and FastSwitch, Shen
et al. 2024), one whose pages were dropped is recomputed.

The manager only plans; it touches no device. `operations` lists the device work to do before the
next step, in an order that makes it safe to reuse a page in the same plan that saves it: programs
run in dispatch order, and a transfer thread sees only staging arrays. A transfer that fails, or
takes twice as long as recomputing, only shortens the cached prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.core.settings.choices import Preemption
from jaxserve.kv.group_match import GroupMatcher
from jaxserve.kv.host_pages import HostKV, HostPages
from jaxserve.kv.insertion import PrefixInserter
from jaxserve.kv.layout import KVLayout
from jaxserve.kv.match import Match, PrefixMatcher
from jaxserve.kv.offload.offload_manager import OffloadManager, Transfer, TransferCounters
from jaxserve.kv.offload.rates import OffloadRates
from jaxserve.kv.offload.transfer_worker import TransferHandle, TransferQueue
from jaxserve.kv.page_allocator import KVCounters, PageAllocator
from jaxserve.kv.page_table import PageTable
from jaxserve.kv.pages import PagePool
from jaxserve.kv.prefix_cache.node import Node
from jaxserve.kv.prefix_cache.node_states import NodeStates
from jaxserve.kv.prefix_cache.prefix_tree import PrefixTree
from jaxserve.kv.tier import Tier


class TierUsage(NamedTuple):
    """Pages of a tier below the device."""

    num_used: int
    num_pages: int


class PageOperations(NamedTuple):
    """Device operations to run before a step, in this order.

    to_host: (device, host) pages to copy, of sequences longer than the pool.
    loads: landed transfers, whose staged pages are scattered to their target pages.
    saves: transfers whose source pages are to be gathered.
    copies: (source, target) pages; all sources are read before any target is written.
    freed: pages that must not be read again before they are written.
    """

    to_host: list[tuple[int, int]]
    loads: list[Transfer]
    saves: list[Transfer]
    copies: list[tuple[int, int]]
    freed: list[int]


class KVManager:
    """Manages the pages of all sequences on all tiers. Not thread-safe: engine thread only."""

    def __init__(
        self,
        pool: PagePool,
        *,
        layout: KVLayout | None = None,
        prefix_caching: bool = True,
        preemption: Preemption = "auto",
        tiers: Mapping[Tier, int] | None = None,
        page_bytes: int = 0,
        transfer_worker: TransferQueue | None = None,
        rates: OffloadRates | None = None,
        host_pages: HostPages | None = None,
    ) -> None:
        """`layout` has the KV groups, one without a window by default. `tiers` gives the number of
        pages of each tier below the device, from the top down; with any, `transfer_worker` copies
        pages of `page_bytes` bytes and `rates` learns their cost. Without `prefix_caching`, only
        pinned pages stay cached when no sequence uses them. `host_pages` are for sequences longer
        than the pool; these neither find nor leave cached pages."""
        self.pool = pool
        self.layout = layout or KVLayout(pool.page_size)
        self.windowed = self.layout.windowed
        self.host_pages = host_pages
        self.tree = PrefixTree(pool.page_size)
        self.rates = rates or OffloadRates()
        self.counters = KVCounters()
        self.page_bytes = page_bytes
        self.prefix_caching = prefix_caching
        self.node_states = NodeStates(pool, self.tree, tiers or {}, prefix_caching)
        self._inserter = PrefixInserter(self.tree, self.node_states)
        self._offload = OffloadManager(
            self.node_states, transfer_worker, page_bytes, pool.page_size, self.rates
        )
        self._preemption = preemption
        self._allocator = PageAllocator(
            pool, self.layout, self.node_states, self._offload, host_pages, self.counters
        )
        common = self.tree, pool, self.rates, page_bytes, preemption
        self._matcher = (
            GroupMatcher(*common, self.layout) if self.windowed else PrefixMatcher(*common)
        )

    @property
    def tiers(self) -> dict[Tier, TierUsage]:
        """The tiers below the device, from the top down, and how full they are."""
        pools = self.node_states.tier_pools.items()
        return {tier: TierUsage(pool.num_used, pool.num_pages) for tier, pool in pools}

    @property
    def host_limits(self) -> HostKV | None:
        """What sequences longer than the pool may take; None if there can be none."""
        return None if self.host_pages is None else self.host_pages.limits

    @property
    def num_free_host_pages(self) -> int:
        """Host pages that no sequence longer than the pool has."""
        return 0 if self.host_pages is None else self.host_pages.num_free

    @property
    def releases_pages(self) -> bool:
        """Whether sequences may give back pages while they run, and so take them as they go."""
        return self.windowed or self.host_pages is not None

    @property
    def num_in_flight_transfers(self) -> int:
        """Transfers that the transfer worker has not ended."""
        return self._offload.num_in_flight_transfers

    @property
    def transfer_counters(self) -> TransferCounters:
        """What was saved and fetched, and what failed."""
        return self._offload.counters

    def transfers(self) -> list[Transfer]:
        """Every planned or in-flight transfer."""
        return self._offload.transfers()

    # Admission

    def new_table(
        self, token_ids: Callable[[int, int], list[int]], salt: bytes, most_tokens: int = 0
    ) -> PageTable:
        """An empty page table of a sequence, arguments as for PageTable; `most_tokens` is how many
        it can have KV of, if that may be more than the pool holds."""
        full = self.layout.num_full
        of_each = self.host_limits.on_host(most_tokens) // full if self.host_limits else 0
        # No salt is other than UTF-8, so that groups share nothing.
        others = tuple(
            PageTable(token_ids, b"\xff%d" % number + salt, (), of_each if number < full else 0)
            for number in range(1, len(self.layout.groups))
        )
        return PageTable(token_ids, salt, others, of_each)

    def pages_for(self, table: PageTable | None, num_tokens: int) -> int:
        """The most device pages that a sequence of `num_tokens` tokens holds at a time."""
        return self._allocator.pages_for(table, num_tokens)

    def match(self, table: PageTable, num_tokens: int) -> Match:
        """Matches the first `num_tokens` tokens of a sequence without pages against the cache."""
        return self._matcher.match(table, 0 if table.num_host_pages else num_tokens)

    def match_on_device(self, table: PageTable, num_tokens: int) -> Match:
        """As `match`, of full pages on the device alone; not for tables with windows."""
        shared = self.match(table, num_tokens).shared
        num_in_use = sum(self.pool.refs(node.device) > 0 for node in shared)
        num_cached = len(shared) * self.pool.page_size
        return Match(shared=shared, num_tokens=num_cached, num_in_use=num_in_use)

    def fits(
        self, match: Match, num_tokens: int, margin: int, table: PageTable | None = None
    ) -> bool:
        """Whether `margin` pages stay available after `allocate`, and the host has its pages for
        a table that needs some."""
        num_pages = self.pages_for(table, num_tokens)
        if table is not None and table.needs_host_pages > self.num_free_host_pages:
            return False
        return self.pool.num_available - (num_pages - match.num_in_use) >= margin

    def allocate(self, table: PageTable, match: Match, num_tokens: int) -> None:
        """Allocates the pages of `num_tokens` tokens to an empty table, the match's pages first;
        of a windowed group, as many as it ever holds.

        Once `is_fetching` is false, the first `table.num_cached` tokens need not be computed; a
        transfer that fails before then lowers that number (or see `fetch_failed`).
        """
        self._allocator.allocate(table, match, num_tokens)

    def is_fetching(self, table: PageTable) -> bool:
        """Whether KV is being copied from a lower tier to pages of a table."""
        return any(self._offload.fetches(own) for own in table.tables)

    def fetch_failed(self, table: PageTable) -> bool:
        """Whether a transfer has failed to bring what a window needs. Its sequence must give its
        pages back and start again, because the pages before the window are missing; it will not
        try to fetch again."""
        failed = any(own.num_cached < own.num_matched for own in table.tables)
        table.may_fetch &= not failed
        return failed

    def extend(self, table: PageTable, start: int, stop: int) -> bool:
        """Prepares a table to compute the tokens start .. stop - 1: gives back the pages that have
        left a window, moves the excess over what may stay to the host, and adds those that are
        missing; adds none and returns False when there are too few."""
        return self._allocator.extend(table, start, stop)

    # Prefix cache

    def known(self, table: PageTable, num_tokens: int) -> tuple[list[Node], int]:
        """The nodes that cache the first `num_tokens` tokens of a sequence on any tier, up to the
        first miss, and how many tokens they cover."""
        return self._matcher.known(table, num_tokens)

    def prefix_nodes(self, table: PageTable, num_tokens: int) -> list[Node]:
        """The nodes that a table holds of its first `num_tokens` tokens."""
        stop = self.pool.pages_for(num_tokens)
        return [node for own in table.tables for node in own.nodes[own.num_released : stop]]

    def cached(self) -> Iterator[list[Node]]:
        """Cached prefixes on the device that no sequence uses, each as its list of nodes; most
        recently used first."""
        for last in reversed(self.node_states.evictable()):
            if any(node.device is not None for node in last.children):
                continue  # Part of a longer cached prefix.
            path, node = [], last
            while node.parent is not None:
                path.append(node)
                node = node.parent
            if all(node.device is not None for node in path):
                yield path[::-1]

    def cache_pages(self, table: PageTable, num_tokens: int, partial: bool = False) -> None:
        """Inserts the full pages of a sequence's first `num_tokens` tokens into the tree; with
        `partial` also the partly filled page after them.

        The tokens must be known, and their KV written by steps already dispatched. Those of a table
        longer than the pool are not inserted.
        """
        if not table.num_host_pages:
            self._inserter.insert(table, num_tokens, partial and not self.windowed)

    def release(
        self, table: PageTable, num_tokens: int, *, pin: bool = False, keep: bool = True
    ) -> None:
        """Releases the pages of a sequence; the KV of its first `num_tokens` tokens is written.

        `pin` pins its nodes until the sequence takes pages again, or until `unpin_table`. Without
        `keep`, evicted pages are not saved to a lower tier.
        """
        arriving = []
        for own in table.tables:
            arriving += [node for fetch in self._offload.fetches(own) for node in fetch.nodes]
            self._offload.abandon_fetches(own, 0)
        self.cache_pages(table, num_tokens, partial=True)
        if pin:
            held = [node for own in table.tables for node in own.nodes[own.num_released :]]
            table.pinned = held + arriving
            self.pin(table.pinned)
        for own in table.tables:
            # Release tails first, so that the head of a prefix is evicted last.
            for index in reversed(range(own.num_released, len(own.pages))):
                node = own.nodes[index] if index < len(own.nodes) else None
                self.node_states.release(own.pages[index], node, keep=keep)
            own.clear()
        for own in table.tables if table.num_host_pages else ():
            self.host_pages.free(own.host_pages)
            own.host_pages = []

    def unpin_table(self, table: PageTable) -> None:
        """Unpins the nodes that a preempted sequence left pinned."""
        self._allocator.unpin_table(table)

    def hand_over_pins(self, table: PageTable, other: PageTable) -> None:
        """Makes `other` the table that unpins what `table` has pinned."""
        other.pinned, table.pinned = table.pinned, []

    def prefers_swap(self, table: PageTable, num_tokens: int) -> bool:
        """Whether to swap a sequence that is being preempted to a lower tier, rather than
        recompute its first `num_tokens` tokens."""
        below = next(iter(self.node_states.tier_pools), None)
        swap = below is not None and self._preemption != "recompute"
        # An ongoing fetch was already judged cheaper than recomputing.
        if swap and self._preemption == "auto" and not self.is_fetching(table):
            num_pages = self.layout.pages_for(num_tokens)
            saved = sum(bool(node.lower) for node in self.prefix_nodes(table, num_tokens))
            out_bytes = self._offload.staged_bytes(max(0, num_pages - saved))
            back_bytes = self._offload.staged_bytes(num_pages)
            swap = self.rates.prefers_swap(
                0, num_tokens, [(Tier.DEVICE, below, out_bytes), (below, Tier.DEVICE, back_bytes)]
            )
        self.counters.swaps += swap
        self.counters.recomputes += not swap
        return swap

    def pin(self, nodes: Iterable[Node]) -> None:
        """Pins nodes: their pages on the devices are evicted when no unpinned page is left there,
        and their only copy on a lower tier never is."""
        for node in nodes:
            self.node_states.pin(node)

    def unpin(self, nodes: Sequence[Node]) -> None:
        """Undoes one `pin` of each node."""
        self.node_states.unpin(nodes)

    def reset(self) -> None:
        """Clears the prefix cache. Sequences keep their pages, which new ones cannot share."""
        self.node_states.reset()

    def evict(self, count: int) -> int:
        """Evicts up to `count` pages that no sequence uses; returns how many."""
        return self._allocator.evict(count)

    # Transfers

    def poll(self, now_us: int) -> list[TransferHandle]:
        """Processes ended transfers and returns their handles; call before planning a step."""
        return self._offload.poll(now_us)

    def operations(self) -> PageOperations:
        """The device operations to run before the step just planned."""
        copies, to_host = self._allocator.take_copies(), self._allocator.take_transfers_to_host()
        copied = {target for _, target in copies}
        return PageOperations(
            to_host=to_host,
            loads=self._offload.take_loads(),
            saves=self._offload.take_saves(),
            copies=copies,
            freed=[page for page in self.node_states.take_freed() if page not in copied],
        )

    def start_save(self, save: Transfer, staging: Any) -> None:
        """Starts a save whose source pages were gathered into `staging`."""
        self._offload.begin_save(save, staging)

    def cancel_save(self, save: Transfer) -> None:
        """Gives up a save: there is no room for its pages."""
        self._offload.refuse_save(save)
