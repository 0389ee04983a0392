"""Offload tiers: saves pages to them, fetches pages back, spills to the next tier, evicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.kv.page_table import PageTable
from jaxserve.kv.prefix_tree import DeviceTransfer, Node
from jaxserve.kv.rates import Rates
from jaxserve.kv.tier_pool import TierPool
from jaxserve.kv.tiers import Tier
from jaxserve.kv.transfer_worker import TransferHandle, TransferState, TransferWorker
from jaxserve.kv.transfers import MOVE_PAGES, Transfer, staged_pages

_LEAST_PATIENCE_US = 50_000
_UNKNOWN_PATIENCE_US = 1_000_000
_REST_US = 1_000_000
"""Pause of spilling after a failed save: a full disk is still full one step later."""
_SPARE_SHARE = 4
"""A tier with another below it keeps 1/4 of its pages free or also stored elsewhere."""


@dataclasses.dataclass
class MoveCounters:
    """Pages saved to and fetched from each lower tier, pages whose only copy was evicted there,
    and transfers that failed, or timed out or got no staging buffer (slow)."""

    saved_pages: dict[Tier, int] = dataclasses.field(default_factory=dict)
    fetched_pages: dict[Tier, int] = dataclasses.field(default_factory=dict)
    lost_pages: int = 0
    failed_moves: int = 0
    slow_moves: int = 0


class OffloadManager:
    """Tracks every transfer: which nodes are in flight, and which lower-tier page each node owns.

    A node takes part in at most one transfer to or from the device and one between lower tiers.
    Pages named by a transfer are not reused before its handle has ended. `settled` is called for
    each node whose transfer has ended.
    """

    def __init__(
        self,
        tiers: Mapping[Tier, int],
        transfer_worker: TransferWorker | None,
        page_bytes: int,
        page_size: int,
        rates: Rates,
        settled: Callable[[Node], None],
    ) -> None:
        """`tiers` gives the number of pages of each tier below the device, from the top down."""
        self.tier_pools = [TierPool(tier, num_pages) for tier, num_pages in tiers.items()]
        self.counters = MoveCounters()
        self.page_bytes = page_bytes
        self._worker = transfer_worker
        self._page_size = page_size
        self._rates = rates
        self._settled = settled
        self._in_flight: dict[TransferHandle, Transfer] = {}
        self._fetches: dict[PageTable, list[Transfer]] = {}
        self._resting_until_us = 0
        self._saves: list[Transfer] = []
        self._loads: list[Transfer] = []

    @property
    def num_in_flight_transfers(self) -> int:
        """Transfers that the transfer worker has not ended."""
        return len(self._in_flight)

    def fetches(self, table: PageTable) -> Sequence[Transfer]:
        """Transfers into a table's pages that its sequence is waiting for."""
        return self._fetches.get(table, ())

    def _end_waiting(self, table: PageTable, transfer: Transfer) -> None:
        fetches = self._fetches[table]
        fetches.remove(transfer)
        if not fetches:
            del self._fetches[table]

    def transfers(self) -> list[Transfer]:
        """Every planned or in-flight transfer."""
        return [*self._saves, *self._in_flight.values()]

    def update_lru(self, node: Node) -> None:
        """Updates a node's place in the eviction orders; frees its lower pages if detached."""
        for tier_pool in self.tier_pools:
            page = tier_pool.page(node)
            if page is not None and not node.attached and not node.moving:
                tier_pool.put(node, None)
                tier_pool.free(page)
            tier_pool.update_lru(node)

    def forget(self, node: Node) -> None:
        """Frees a node's lower-tier pages, unless a transfer is using them."""
        if not node.moving:
            for tier_pool in self.tier_pools:
                self._give_up(tier_pool, node)

    def save(self, node: Node, page: int) -> bool:
        """Plans to save a node whose device page is evicted; False if no lower tier has room."""
        for may_lose in (False, True):  # Prefer a slower tier over evicting an only copy.
            for tier_pool in self.tier_pools:
                target = self._take_page(tier_pool, may_lose)
                if target is not None:
                    self._add_save(tier_pool.tier, node, page, target)
                    return True
        return False

    def fetch(self, nodes: Sequence[Node], num_shared: int) -> list[Transfer]:
        """Plans transfers of `nodes` to the device; their lower-tier pages stay until those end.

        The first `num_shared` nodes get a device page; one node after them is only copied from.
        """
        transfers: list[Transfer] = []
        for index, node in enumerate(nodes):
            tier_pool = next(
                tier_pool for tier_pool in self.tier_pools if tier_pool.page(node) is not None
            )
            last = transfers[-1] if transfers else None
            if last is None or last.source is not tier_pool.tier or len(last.nodes) == MOVE_PAGES:
                transfers.append(Transfer(tier_pool.tier, Tier.DEVICE))
            transfer = transfers[-1]
            transfer.nodes.append(node)
            transfer.source_pages.append(tier_pool.page(node))
            transfer.num_shared += index < num_shared
            node.transfer = DeviceTransfer.AWAITED
            tier_pool.update_lru(node)
        return transfers

    def begin_fetches(self, transfers: Sequence[Transfer], table: PageTable, first: int) -> None:
        """Starts transfers into the pages of a table, from its page `first` on."""
        num_pages = sum(len(transfer.nodes) for transfer in transfers)
        patience_us = self._patience_us(first, first + num_pages)
        for transfer in transfers:
            count = len(transfer.nodes)
            transfer.table, transfer.first = table, first
            transfer.target_pages = table.pages[first : first + count]
            self._fetches.setdefault(table, []).append(transfer)
            self._start(transfer, patience_us)
            first += count

    def begin_save(self, transfer: Transfer, staging: Any) -> None:
        """Starts a save whose pages were gathered into `staging`."""
        self._start(transfer, self._patience_us(0, len(transfer.nodes)), staging)

    def refuse_save(self, transfer: Transfer) -> None:
        """Cancels a save because no staging buffer was free."""
        self.counters.slow_moves += 1
        self._end_save(transfer, landed=False)

    def abandon_fetches(self, table: PageTable, start: int) -> None:
        """Abandons the transfers into a table's pages from page `start` on."""
        for transfer in [fetch for fetch in self.fetches(table) if fetch.first >= start]:
            self._end_waiting(table, transfer)
            transfer.stop_waiting()
            transfer.handle.abandon()

    def staged_bytes(self, num_pages: int) -> int:
        """Bytes transferred for `num_pages` pages to or from the device, padding included."""
        return staged_pages(num_pages) * self.page_bytes

    def take_saves(self) -> list[Transfer]:
        saves, self._saves = self._saves, []
        for save in saves:  # Tails were evicted first; copies go in ascending order.
            for upside_down in (save.nodes, save.source_pages, save.target_pages):
                upside_down.reverse()
        return saves

    def take_loads(self) -> list[Transfer]:
        loads, self._loads = self._loads, []
        return loads

    def poll(self, now_us: int) -> list[TransferHandle]:
        """Processes ended transfers, abandons those past their deadline, and spills to the next
        tier what would soon be evicted. Returns the handles that ended."""
        if self._worker is None:
            return []
        ended = self._worker.ended()
        for handle in ended:
            if handle.state is TransferState.LANDED:
                self._learn(handle, handle.ended_us - handle.begun_us)
            self._end(self._in_flight.pop(handle))
        for transfer in list(self._in_flight.values()):
            if transfer.awaited and now_us > transfer.deadline_us:
                self._lose_patience(transfer)
                self._learn(transfer.handle, now_us - transfer.handle.begun_us)  # A lower bound.
        if now_us >= self._resting_until_us:
            for upper, lower in zip(self.tier_pools, self.tier_pools[1:]):
                self._pass_on(upper, lower)
        return ended

    def _start(self, transfer: Transfer, patience_us: int, staging: Any = None) -> None:
        transfer.handle = handle = self._worker.move(
            transfer.source, transfer.source_pages, transfer.target, transfer.target_pages, staging
        )
        transfer.deadline_us = handle.begun_us + patience_us
        self._in_flight[handle] = transfer

    def _patience_us(self, first: int, stop: int) -> int:
        """Timeout for transferring pages first .. stop - 1 of a sequence: twice their recompute
        time, so that a timeout plus the recompute takes at most three times the recompute."""
        recompute_us = self._rates.prefill_us(first * self._page_size, stop * self._page_size)
        if recompute_us is None:
            return _UNKNOWN_PATIENCE_US
        return max(2 * recompute_us, _LEAST_PATIENCE_US)

    def _learn(self, handle: TransferHandle, us: int) -> None:
        num_bytes = self.staged_bytes(len(handle.source_pages))
        self._rates.moved(handle.source, handle.target, num_bytes, us)

    def _lose_patience(self, transfer: Transfer) -> None:
        """Stops waiting for a transfer; a save that still completes is used."""
        self.counters.slow_moves += 1
        transfer.stop_waiting()
        if transfer.target is Tier.DEVICE:
            self._cut_short(transfer)

    def _cut_short(self, transfer: Transfer) -> None:
        """Has the sequence recompute the pages of this fetch and all pages after them."""
        table = transfer.table
        table.num_cached = min(table.num_cached, transfer.first * self._page_size)
        self.abandon_fetches(table, transfer.first)

    def _end(self, transfer: Transfer) -> None:
        landed = transfer.handle.state is TransferState.LANDED
        failed = transfer.handle.state is TransferState.FAILED
        self.counters.failed_moves += failed
        if transfer.target is Tier.DEVICE:
            self._end_fetch(transfer, landed and transfer.awaited)
        else:
            self._end_save(transfer, landed)
            if failed:
                self._resting_until_us = transfer.handle.ended_us + _REST_US

    def _end_fetch(self, transfer: Transfer, landed: bool) -> None:
        tier_pool = self._tier_pool(transfer.source)
        if landed:
            self._loads.append(transfer)
            table = transfer.table
            self._end_waiting(table, transfer)
            for offset, node in enumerate(transfer.nodes[: transfer.num_shared]):
                if node.attached and len(table.nodes) == transfer.first + offset:
                    node.device = transfer.target_pages[offset]
                    table.nodes.append(node)
            _count(self.counters.fetched_pages, tier_pool.tier, len(transfer.nodes))
        elif transfer.awaited:
            self._cut_short(transfer)
        for node in transfer.nodes:
            node.transfer = DeviceTransfer.NONE
            if transfer.handle.state is TransferState.FAILED and not node.moving:
                self._give_up(tier_pool, node)  # A failed read may be permanent.
            self._settled(node)

    def _end_save(self, transfer: Transfer, landed: bool) -> None:
        """Ends a save, or a spill between lower tiers, which keeps the upper copy."""
        tier_pool = self._tier_pool(transfer.target)
        for node, page in zip(transfer.nodes, transfer.target_pages):
            if transfer.source is Tier.DEVICE:
                node.transfer = DeviceTransfer.NONE
            else:
                node.spilling = False
            if landed:
                tier_pool.put(node, page)
            else:
                tier_pool.free(page)
            self._settled(node)
        if landed:
            _count(self.counters.saved_pages, tier_pool.tier, len(transfer.nodes))
        elif transfer.source is not Tier.DEVICE:  # They are still the least recently used.
            for node in reversed(transfer.nodes):
                self._tier_pool(transfer.source).first(node)

    def _pass_on(self, upper: TierPool, lower: TierPool) -> None:
        """Spills the next pages to be evicted to the tier below, ahead of their eviction."""
        in_flight = (t for t in self._in_flight.values() if t.source is upper.tier)
        coming = sum(len(t.nodes) for t in in_flight if t.target is lower.tier)
        wanted = -(-upper.num_pages // _SPARE_SHARE) - upper.num_spare - coming
        transfer = Transfer(upper.tier, lower.tier)
        for node in upper.oldest(min(wanted, MOVE_PAGES)):
            page = self._take_page(lower, may_lose=True, above=upper)
            if page is None:
                break
            transfer.nodes.append(node)
            transfer.source_pages.append(upper.page(node))
            transfer.target_pages.append(page)
            node.spilling = True
            upper.update_lru(node)
        if transfer.nodes:
            self._start(transfer, self._patience_us(0, len(transfer.nodes)))

    def _add_save(self, target: Tier, node: Node, page: int, target_page: int) -> None:
        last = self._saves[-1] if self._saves else None
        if last is None or last.target is not target or len(last.nodes) == MOVE_PAGES:
            self._saves.append(Transfer(Tier.DEVICE, target))
        transfer = self._saves[-1]
        transfer.nodes.append(node)
        transfer.source_pages.append(page)
        transfer.target_pages.append(target_page)
        node.transfer = DeviceTransfer.AWAITED

    def _take_page(
        self, tier_pool: TierPool, may_lose: bool, above: TierPool | None = None
    ) -> int | None:
        """Allocates a page of a tier, evicting if needed; None if nothing can be evicted. `above`
        is the tier of the page to be copied. With `may_lose`, an only copy may be evicted (LRU)."""
        if not tier_pool.num_free:
            victim = tier_pool.copy_of_another(above)
            if victim is None and may_lose:
                victim = next(iter(tier_pool.oldest(1)), None)
                self.counters.lost_pages += victim is not None
            if victim is not None:
                self._give_up(tier_pool, victim)
                self._settled(victim)
        return tier_pool.allocate()

    def _give_up(self, tier_pool: TierPool, node: Node) -> None:
        page = tier_pool.page(node)
        if page is not None:
            tier_pool.put(node, None)
            tier_pool.free(page)
            tier_pool.update_lru(node)

    def _tier_pool(self, tier: Tier) -> TierPool:
        return next(tier_pool for tier_pool in self.tier_pools if tier_pool.tier is tier)


def _count(counts: dict[Tier, int], tier: Tier, num_pages: int) -> None:
    counts[tier] = counts.get(tier, 0) + num_pages
