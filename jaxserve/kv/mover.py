"""The tiers below the device: what is saved there, brought back, passed on and given up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxserve.kv.copier import Copier, Ticket, TicketState
from jaxserve.kv.prefix_tree import Node
from jaxserve.kv.rates import Rates
from jaxserve.kv.shelf import Shelf
from jaxserve.kv.table import PageTable
from jaxserve.kv.tiers import Tier
from jaxserve.kv.transfers import MOVE_PAGES, Transfer, staged_pages

_LEAST_PATIENCE_US = 50_000
_UNKNOWN_PATIENCE_US = 1_000_000
_REST_US = 1_000_000
"""After a failed save nothing is passed on for so long: a full disk will be full in a step, too."""
_SPARE_SHARE = 4
"""A tier with another below it keeps a quarter of its pages free, or such as lie below as well."""


@dataclasses.dataclass
class MoveCounters:
    """Pages by the lower tier they came to or from, those whose only image had to give way there,
    and moves that came to nothing."""

    saved_pages: dict[Tier, int] = dataclasses.field(default_factory=dict)
    fetched_pages: dict[Tier, int] = dataclasses.field(default_factory=dict)
    lost_pages: int = 0
    failed_moves: int = 0
    slow_moves: int = 0


class Mover:
    """Keeps the books of every move: which node is on its way, and who has which lower page.

    A node takes part in one move to or from the device at a time, and in one between lower tiers;
    nothing that a transfer names is given to another use before its ticket ended. `settled` is
    called for a node whose transfer is over.
    """

    def __init__(
        self,
        tiers: Mapping[Tier, int],
        copier: Copier | None,
        page_bytes: int,
        page_size: int,
        rates: Rates,
        settled: Callable[[Node], None],
    ) -> None:
        """`tiers` gives the number of pages of each tier below the device, from the top down."""
        self.shelves = [Shelf(tier, num_pages) for tier, num_pages in tiers.items()]
        self.counters = MoveCounters()
        self.page_bytes = page_bytes
        self._copier = copier
        self._page_size = page_size
        self._rates = rates
        self._settled = settled
        self._under_way: dict[Ticket, Transfer] = {}
        self._resting_until_us = 0
        self._saves: list[Transfer] = []
        self._loads: list[Transfer] = []

    @property
    def num_under_way(self) -> int:
        """Moves that the copier has not ended."""
        return len(self._under_way)

    def transfers(self) -> list[Transfer]:
        """Every move that is planned or under way."""
        return [*self._saves, *self._under_way.values()]

    def file(self, node: Node) -> None:
        """Puts a node in its place among those that may give way, or frees what it has here."""
        for shelf in self.shelves:
            page = shelf.page(node)
            if page is not None and not node.attached and not node.moving:
                shelf.put(node, None)
                shelf.free(page)
            shelf.file(node)

    def forget(self, node: Node) -> None:
        """Frees a node's pages here, those of a transfer excepted."""
        if not node.moving:
            for shelf in self.shelves:
                self._give_up(shelf, node)

    def save(self, node: Node, page: int) -> bool:
        """Has the image of a node that loses its device page saved, if there is room below."""
        for may_lose in (False, True):  # A slower tier sooner than another's only image.
            for shelf in self.shelves:
                target = self._take_page(shelf, may_lose)
                if target is not None:
                    self._add_save(shelf.tier, node, page, target)
                    return True
        return False

    def fetch(self, nodes: Sequence[Node], num_shared: int) -> list[Transfer]:
        """Plans moves of `nodes` to the device, and keeps their images where they are till then.

        The first `num_shared` become the device's own, one after them is only copied from.
        """
        transfers: list[Transfer] = []
        for index, node in enumerate(nodes):
            shelf = next(shelf for shelf in self.shelves if shelf.page(node) is not None)
            last = transfers[-1] if transfers else None
            if last is None or last.source is not shelf.tier or len(last.nodes) == MOVE_PAGES:
                transfers.append(Transfer(shelf.tier, Tier.DEVICE))
            transfer = transfers[-1]
            transfer.nodes.append(node)
            transfer.source_pages.append(shelf.page(node))
            transfer.num_shared += index < num_shared
            node.transfer = transfer
            shelf.file(node)
        return transfers

    def begin_fetches(self, transfers: Sequence[Transfer], table: PageTable, first: int) -> None:
        """Starts moves into the pages of a table, from its page `first` on."""
        num_pages = sum(len(transfer.nodes) for transfer in transfers)
        patience_us = self._patience_us(first, first + num_pages)
        for transfer in transfers:
            count = len(transfer.nodes)
            transfer.table, transfer.first = table, first
            transfer.target_pages = table.pages[first : first + count]
            table.fetches.append(transfer)
            self._start(transfer, patience_us)
            first += count

    def begin_save(self, transfer: Transfer, staging: Any) -> None:
        """Starts a save whose pages were gathered into `staging`."""
        self._start(transfer, self._patience_us(0, len(transfer.nodes)), staging)

    def refuse_save(self, transfer: Transfer) -> None:
        """Gives up a save that no staging buffer was free for."""
        self.counters.slow_moves += 1
        self._end_save(transfer, landed=False)

    def abandon_fetches(self, table: PageTable, start: int) -> None:
        """Stops waiting for the moves into a table's pages from page `start` on."""
        for transfer in [fetch for fetch in table.fetches if fetch.first >= start]:
            table.fetches.remove(transfer)
            transfer.awaited = False
            transfer.ticket.abandon()

    def staged_bytes(self, num_pages: int) -> int:
        """Bytes that are moved to move pages to the device or from it, padding included."""
        return staged_pages(num_pages) * self.page_bytes

    def take_saves(self) -> list[Transfer]:
        saves, self._saves = self._saves, []
        for save in saves:  # Tails were evicted first; copies run upwards.
            for upside_down in (save.nodes, save.source_pages, save.target_pages):
                upside_down.reverse()
        return saves

    def take_loads(self) -> list[Transfer]:
        loads, self._loads = self._loads, []
        return loads

    def poll(self, now_us: int) -> list[Ticket]:
        """Takes in the moves that ended, gives up those that take too long, and passes on to the
        next tier what would soon have to give way. Returns the tickets that ended."""
        if self._copier is None:
            return []
        ended = self._copier.ended()
        for ticket in ended:
            if ticket.state is TicketState.LANDED:
                self._learn(ticket, ticket.ended_us - ticket.begun_us)
            self._end(self._under_way.pop(ticket))
        for transfer in list(self._under_way.values()):
            if transfer.awaited and now_us > transfer.deadline_us:
                self._lose_patience(transfer)
                self._learn(transfer.ticket, now_us - transfer.ticket.begun_us)  # Or more.
        if now_us >= self._resting_until_us:
            for upper, lower in zip(self.shelves, self.shelves[1:]):
                self._pass_on(upper, lower)
        return ended

    def _start(self, transfer: Transfer, patience_us: int, staging: Any = None) -> None:
        transfer.ticket = ticket = self._copier.move(
            transfer.source, transfer.source_pages, transfer.target, transfer.target_pages, staging
        )
        transfer.deadline_us = ticket.begun_us + patience_us
        self._under_way[ticket] = transfer

    def _patience_us(self, first: int, stop: int) -> int:
        """How long to wait for pages first .. stop - 1 of a sequence: twice what computing them
        would take, so that waiting in vain and then computing takes three times that at most."""
        recompute_us = self._rates.prefill_us(first * self._page_size, stop * self._page_size)
        if recompute_us is None:
            return _UNKNOWN_PATIENCE_US
        return max(2 * recompute_us, _LEAST_PATIENCE_US)

    def _learn(self, ticket: Ticket, us: int) -> None:
        num_bytes = self.staged_bytes(len(ticket.source_pages))
        self._rates.moved(ticket.source, ticket.target, num_bytes, us)

    def _lose_patience(self, transfer: Transfer) -> None:
        """Nobody waits any longer; what is saved in the end is still of use."""
        self.counters.slow_moves += 1
        transfer.awaited = False
        if transfer.target is Tier.DEVICE:
            self._cut_short(transfer)

    def _cut_short(self, transfer: Transfer) -> None:
        """Has a table's sequence compute what this move would have brought, and all after it."""
        table = transfer.table
        table.num_cached = min(table.num_cached, transfer.first * self._page_size)
        self.abandon_fetches(table, transfer.first)

    def _end(self, transfer: Transfer) -> None:
        landed = transfer.ticket.state is TicketState.LANDED
        failed = transfer.ticket.state is TicketState.FAILED
        self.counters.failed_moves += failed
        if transfer.target is Tier.DEVICE:
            self._end_fetch(transfer, landed and transfer.awaited)
        else:
            self._end_save(transfer, landed)
            if failed:
                self._resting_until_us = transfer.ticket.ended_us + _REST_US

    def _end_fetch(self, transfer: Transfer, landed: bool) -> None:
        shelf = self._shelf(transfer.source)
        if landed:
            self._loads.append(transfer)
            table = transfer.table
            table.fetches.remove(transfer)
            for offset, node in enumerate(transfer.nodes[: transfer.num_shared]):
                if node.attached and len(table.nodes) == transfer.first + offset:
                    node.device = transfer.target_pages[offset]
                    table.nodes.append(node)
            _count(self.counters.fetched_pages, shelf.tier, len(transfer.nodes))
        elif transfer.awaited:
            self._cut_short(transfer)
        for node in transfer.nodes:
            node.transfer = None
            if transfer.ticket.state is TicketState.FAILED and not node.moving:
                self._give_up(shelf, node)  # What could not be read now may never be.
            self._settled(node)

    def _end_save(self, transfer: Transfer, landed: bool) -> None:
        """Also ends a move from one lower tier to the next, which keeps the upper image."""
        shelf = self._shelf(transfer.target)
        for node, page in zip(transfer.nodes, transfer.target_pages):
            if transfer.source is Tier.DEVICE:
                node.transfer = None
            else:
                node.passing = None
            if landed:
                shelf.put(node, page)
            else:
                shelf.free(page)
            self._settled(node)
        if landed:
            _count(self.counters.saved_pages, shelf.tier, len(transfer.nodes))
        elif transfer.source is not Tier.DEVICE:  # They are still those used last longest ago.
            for node in reversed(transfer.nodes):
                self._shelf(transfer.source).first(node)

    def _pass_on(self, upper: Shelf, lower: Shelf) -> None:
        """Copies the images that would give way next to the tier below, before they have to."""
        under_way = (t for t in self._under_way.values() if t.source is upper.tier)
        coming = sum(len(t.nodes) for t in under_way if t.target is lower.tier)
        wanted = -(-upper.num_pages // _SPARE_SHARE) - upper.num_spare - coming
        transfer = Transfer(upper.tier, lower.tier)
        for node in upper.oldest(min(wanted, MOVE_PAGES)):
            page = self._take_page(lower, may_lose=True, above=upper)
            if page is None:
                break
            transfer.nodes.append(node)
            transfer.source_pages.append(upper.page(node))
            transfer.target_pages.append(page)
            node.passing = transfer
            upper.file(node)
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
        node.transfer = transfer

    def _take_page(self, shelf: Shelf, may_lose: bool, above: Shelf | None = None) -> int | None:
        """A page of a tier, for an image on `above` if given; None if none is free and nobody gives
        way. With `may_lose` even an only image does, the one used last longest ago."""
        if not shelf.num_free:
            victim = shelf.copy_of_another(above)
            if victim is None and may_lose:
                victim = next(iter(shelf.oldest(1)), None)
                self.counters.lost_pages += victim is not None
            if victim is not None:
                self._give_up(shelf, victim)
                self._settled(victim)
        return shelf.allocate()

    def _give_up(self, shelf: Shelf, node: Node) -> None:
        page = shelf.page(node)
        if page is not None:
            shelf.put(node, None)
            shelf.free(page)
            shelf.file(node)

    def _shelf(self, tier: Tier) -> Shelf:
        return next(shelf for shelf in self.shelves if shelf.tier is tier)


def _count(counts: dict[Tier, int], tier: Tier, num_pages: int) -> None:
    counts[tier] = counts.get(tier, 0) + num_pages
