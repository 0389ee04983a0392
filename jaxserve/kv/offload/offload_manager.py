"""Offload tiers: saves pages to them, fetches pages back, spills to the next tier, evicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxserve.core.arithmetic import cdiv
from jaxserve.kv.layout import TRANSFER_PAGES, staged_pages
from jaxserve.kv.offload.rates import OffloadRates
from jaxserve.kv.offload.transfer_worker import TransferHandle, TransferQueue, TransferState
from jaxserve.kv.page_table import PageTable
from jaxserve.kv.prefix_cache.node import Node, NodeState
from jaxserve.kv.prefix_cache.node_states import NodeStates
from jaxserve.kv.prefix_cache.tier_pool import TierPool
from jaxserve.kv.tier import Tier

_MIN_TIMEOUT_US = 50_000
_DEFAULT_TIMEOUT_US = 1_000_000
_BACK_OFF_US = 1_000_000
"""Pause of spilling after a failed save: a full disk is still full one step later."""
_SPARE_SHARE = 4
"""A tier with another below it keeps 1/4 of its pages free or also stored elsewhere."""


@dataclasses.dataclass
class TransferCounters:
    """Pages saved to and fetched from each lower tier, pages whose only copy was evicted there,
    and transfers that failed, or timed out or got no staging buffer (slow)."""

    saved_pages: dict[Tier, int] = dataclasses.field(default_factory=dict)
    fetched_pages: dict[Tier, int] = dataclasses.field(default_factory=dict)
    lost_pages: int = 0
    failed_transfers: int = 0
    slow_transfers: int = 0


@dataclasses.dataclass(eq=False)
class Transfer:
    """A transfer of the pages of at most TRANSFER_PAGES nodes from one tier to another.

    A transfer to the device fills pages of `table`, from its page `first` on. When it has landed,
    the first `num_shared` nodes own those pages; a last node beyond them is only copied from.
    """

    source: Tier
    target: Tier
    nodes: list[Node] = dataclasses.field(default_factory=list)
    source_pages: list[int] = dataclasses.field(default_factory=list)
    target_pages: list[int] = dataclasses.field(default_factory=list)
    num_shared: int = 0
    table: PageTable | None = None
    first: int = 0
    handle: TransferHandle | None = None
    deadline_us: int | None = None
    awaited: bool = True
    """Whether it is worth waiting for; its pages are released when its handle ends either way."""


class OffloadManager:
    """Tracks every transfer, and has `NodeStates` record what begins and ends.

    A node takes part in at most one transfer to or from the device and one between lower tiers.
    Pages named by a transfer are not reused before its handle has ended.
    """

    def __init__(
        self,
        states: NodeStates,
        transfer_worker: TransferQueue | None,
        page_bytes: int,
        page_size: int,
        rates: OffloadRates,
    ) -> None:
        self.counters = TransferCounters()
        self.page_bytes = page_bytes
        self._states = states
        self._tier_pools = list(states.tier_pools.values())
        self._worker = transfer_worker
        self._page_size = page_size
        self._rates = rates
        self._in_flight: dict[TransferHandle, Transfer] = {}
        self._fetches: dict[PageTable, list[Transfer]] = {}
        self._back_off_until_us = 0
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

    def save(self, node: Node) -> bool:
        """Plans to save a cached node, and evicts its device page; False if no lower tier has
        room."""
        for may_lose in (False, True):  # Prefer a slower tier over evicting an only copy.
            for tier_pool in self._tier_pools:
                target = self._take_page(tier_pool, may_lose)
                if target is not None:
                    self._add_save(tier_pool.tier, node, target)
                    return True
        return False

    def fetch(self, nodes: Sequence[Node], num_shared: int) -> list[Transfer]:
        """Plans transfers of `nodes` to the device; their lower-tier pages stay until those end.

        The first `num_shared` nodes get a device page; one node after them is only copied from.
        """
        transfers: list[Transfer] = []
        for index, node in enumerate(nodes):
            tier, page = node.nearest
            last = transfers[-1] if transfers else None
            if last is None or last.source is not tier or len(last.nodes) == TRANSFER_PAGES:
                transfers.append(Transfer(tier, Tier.DEVICE))
            transfer = transfers[-1]
            transfer.nodes.append(node)
            transfer.source_pages.append(page)
            transfer.num_shared += index < num_shared
            self._states.transition(node, NodeState.FETCHING)
        return transfers

    def begin_fetches(self, transfers: Sequence[Transfer], table: PageTable, first: int) -> None:
        """Starts transfers into the pages of a table, from its page `first` on."""
        num_pages = sum(len(transfer.nodes) for transfer in transfers)
        timeout_us = self._timeout_us(first, first + num_pages)
        for transfer in transfers:
            count = len(transfer.nodes)
            transfer.table, transfer.first = table, first
            transfer.target_pages = table.pages[first : first + count]
            self._fetches.setdefault(table, []).append(transfer)
            self._start(transfer, timeout_us)
            first += count

    def begin_save(self, transfer: Transfer, staging: Any) -> None:
        """Starts a save whose pages were gathered into `staging`."""
        self._start(transfer, self._timeout_us(0, len(transfer.nodes)), staging)

    def refuse_save(self, transfer: Transfer) -> None:
        """Cancels a save because no staging buffer was free."""
        self.counters.slow_transfers += 1
        self._end_save(transfer, landed=False)

    def abandon_fetches(self, table: PageTable, start: int) -> None:
        """Abandons the transfers into a table's pages from page `start` on."""
        for transfer in [fetch for fetch in self.fetches(table) if fetch.first >= start]:
            self._end_waiting(table, transfer)
            self._stop_waiting(transfer)
            transfer.handle.abandon()

    def staged_bytes(self, num_pages: int) -> int:
        """Bytes transferred for `num_pages` pages to or from the device, padding included."""
        return staged_pages(num_pages) * self.page_bytes

    def take_saves(self) -> list[Transfer]:
        saves, self._saves = self._saves, []
        for save in saves:  # Tails were evicted first; copies go in ascending order.
            for column in (save.nodes, save.source_pages, save.target_pages):
                column.reverse()
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
                self._time_out(transfer)
                self._learn(transfer.handle, now_us - transfer.handle.begun_us)  # A lower bound.
        if now_us >= self._back_off_until_us:
            for upper, lower in zip(self._tier_pools, self._tier_pools[1:]):
                self._spill(upper, lower)
        return ended

    def _start(self, transfer: Transfer, timeout_us: int, staging: Any = None) -> None:
        transfer.handle = handle = self._worker.submit(
            transfer.source, transfer.source_pages, transfer.target, transfer.target_pages, staging
        )
        transfer.deadline_us = handle.begun_us + timeout_us
        self._in_flight[handle] = transfer

    def _timeout_us(self, first: int, stop: int) -> int:
        """Timeout for transferring pages first .. stop - 1 of a sequence: twice their recompute
        time, so that a timeout plus the recompute takes at most three times the recompute."""
        recompute_us = self._rates.prefill_us(first * self._page_size, stop * self._page_size)
        if recompute_us is None:
            return _DEFAULT_TIMEOUT_US
        return max(2 * recompute_us, _MIN_TIMEOUT_US)

    def _learn(self, handle: TransferHandle, us: int) -> None:
        num_bytes = self.staged_bytes(len(handle.source_pages))
        self._rates.transferred(handle.source, handle.target, num_bytes, us)

    def _time_out(self, transfer: Transfer) -> None:
        """Stops waiting for a transfer; a save that still completes is used."""
        self.counters.slow_transfers += 1
        self._stop_waiting(transfer)
        if transfer.target is Tier.DEVICE:
            self._truncate_fetch(transfer)

    def _stop_waiting(self, transfer: Transfer) -> None:
        """Marks that no sequence waits for a transfer any more."""
        if transfer.awaited:
            transfer.awaited = False
            if Tier.DEVICE in (transfer.source, transfer.target):
                for node in transfer.nodes:
                    self._states.transition(node, NodeState.ABANDONED)

    def _truncate_fetch(self, transfer: Transfer) -> None:
        """Has the sequence recompute the pages of this fetch and all pages after them."""
        table = transfer.table
        table.num_cached = min(table.num_cached, transfer.first * self._page_size)
        self.abandon_fetches(table, transfer.first)

    def _end(self, transfer: Transfer) -> None:
        landed = transfer.handle.state is TransferState.LANDED
        failed = transfer.handle.state is TransferState.FAILED
        self.counters.failed_transfers += failed
        if transfer.target is Tier.DEVICE:
            self._end_fetch(transfer, landed and transfer.awaited)
        else:
            self._end_save(transfer, landed)
            if failed:
                self._back_off_until_us = transfer.handle.ended_us + _BACK_OFF_US

    def _end_fetch(self, transfer: Transfer, landed: bool) -> None:
        table = transfer.table
        if landed:
            self._loads.append(transfer)
            self._end_waiting(table, transfer)
            _count(self.counters.fetched_pages, transfer.source, len(transfer.nodes))
        elif transfer.awaited:
            self._truncate_fetch(transfer)
        failed = transfer.handle.state is TransferState.FAILED
        for offset, node in enumerate(transfer.nodes):
            if (
                landed
                and offset < transfer.num_shared
                and node.attached
                and len(table.nodes) == transfer.first + offset
            ):
                self._states.transition(node, NodeState.IN_USE, transfer.target_pages[offset])
                table.nodes.append(node)
                continue
            self._states.transition(node, NodeState.ABSENT)
            if failed and not node.moving:
                self._states.discard(node, transfer.source)  # A failed read may be permanent.

    def _end_save(self, transfer: Transfer, landed: bool) -> None:
        """Ends a save, or a spill between lower tiers, which keeps the upper copy."""
        tier_pool = self._states.tier_pools[transfer.target]
        pairs = list(zip(transfer.nodes, transfer.target_pages))
        # Nodes whose spill failed are still the least recently used, the first of them first.
        for node, page in pairs if landed else reversed(pairs):
            if landed:
                self._states.store(node, transfer.target, page)
            else:
                tier_pool.free(page)
            if transfer.source is Tier.DEVICE:
                self._states.transition(node, NodeState.ABSENT)
            else:
                self._states.end_spill(node, retry=None if landed else transfer.source)
        if landed:
            _count(self.counters.saved_pages, transfer.target, len(transfer.nodes))

    def _spill(self, upper: TierPool, lower: TierPool) -> None:
        """Spills the next pages to be evicted to the tier below, ahead of their eviction."""
        in_flight = (t for t in self._in_flight.values() if t.source is upper.tier)
        coming = sum(len(t.nodes) for t in in_flight if t.target is lower.tier)
        wanted = cdiv(upper.num_pages, _SPARE_SHARE) - upper.num_spare - coming
        transfer = Transfer(upper.tier, lower.tier)
        for node in upper.oldest(min(wanted, TRANSFER_PAGES)):
            page = self._take_page(lower, may_lose=True, above=upper)
            if page is None:
                break
            transfer.nodes.append(node)
            transfer.source_pages.append(node.lower[upper.tier])
            transfer.target_pages.append(page)
            self._states.begin_spill(node)
        if transfer.nodes:
            self._start(transfer, self._timeout_us(0, len(transfer.nodes)))

    def _add_save(self, target: Tier, node: Node, target_page: int) -> None:
        last = self._saves[-1] if self._saves else None
        if last is None or last.target is not target or len(last.nodes) == TRANSFER_PAGES:
            self._saves.append(Transfer(Tier.DEVICE, target))
        transfer = self._saves[-1]
        transfer.nodes.append(node)
        transfer.source_pages.append(node.device)
        transfer.target_pages.append(target_page)
        self._states.transition(node, NodeState.SAVING)

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
                self._states.discard(victim, tier_pool.tier)
        return tier_pool.allocate()


def _count(counts: dict[Tier, int], tier: Tier, num_pages: int) -> None:
    counts[tier] = counts.get(tier, 0) + num_pages
