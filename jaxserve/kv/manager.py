"""Who owns which KV page, what is remembered of pages nobody owns, and what moves between tiers.

One mechanism serves all sharing and all swapping: the prefix tree. Sequences that begin alike share
the pages of their beginning, whether they are samples of one prompt, beams, turns of a conversation
or strangers. What a sequence leaves behind (it ended, or it was preempted) stays in the tree until
its pages are needed; then its images move to the host's memory and on to a disk, where there are
such tiers, or are forgotten. On admission, whatever is still known of a sequence's tokens need not
be computed: a preempted sequence whose pages were moved away and back has been swapped (as in vLLM,
Kwon et al. 2023, and FastSwitch, Shen et al. 2024), one whose pages were forgotten is recomputed.

The manager plans; it touches no device. `operations` lists what must be done on the device before
the next step, in an order that makes it safe to give a page to another in the very plan that saves
its image: programs run in the order they were dispatched, and a copier thread sees only staged
images. A move that fails, or takes twice as long as recomputing, only makes a prefix shorter.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxserve.kv.copier import Copier, Ticket
from jaxserve.kv.match import Match, Matcher, Preemption
from jaxserve.kv.mover import Mover
from jaxserve.kv.pages import PagePool
from jaxserve.kv.prefix_tree import Node, PrefixTree
from jaxserve.kv.rates import Rates
from jaxserve.kv.table import PageTable
from jaxserve.kv.tiers import Tier
from jaxserve.kv.transfers import Operations, Transfer


@dataclasses.dataclass
class KVCounters:
    """What has happened to pages on the device: copied for a second writer, taken from nobody, and
    taken with the only image there was; and how preempted sequences were treated."""

    copied_pages: int = 0
    evicted_pages: int = 0
    lost_pages: int = 0
    swaps: int = 0
    recomputes: int = 0


class KVManager:
    """The pages of every sequence, on every tier. Not thread-safe: for the engine's thread."""

    def __init__(
        self,
        pool: PagePool,
        *,
        prefix_caching: bool = True,
        preemption: Preemption = "auto",
        tiers: Mapping[Tier, int] | None = None,
        page_bytes: int = 0,
        copier: Copier | None = None,
        rates: Rates | None = None,
    ) -> None:
        """`tiers` gives the pages of each tier below the device, from the top down; with any,
        `copier` moves images of `page_bytes` bytes, and `rates` learns what that costs. Without
        `prefix_caching`, pages are remembered only for those who mean to come back to them."""
        self.pool = pool
        self.tree = PrefixTree(pool.page_size)
        self.rates = rates or Rates()
        self.counters = KVCounters()
        self.mover = Mover(
            tiers or {}, copier, page_bytes, pool.page_size, self.rates, settled=self._file
        )
        self._retain = prefix_caching
        self._preemption = preemption
        self._kept: OrderedDict[Node, None] = OrderedDict()
        self._kept_pinned: OrderedDict[Node, None] = OrderedDict()
        self._copies: list[tuple[int, int]] = []
        self._freed: list[int] = []
        self._matcher = Matcher(self.tree, pool, self.rates, page_bytes, preemption)

    @property
    def num_evictable(self) -> int:
        """Pages on the device that are kept and that no sequence uses."""
        return len(self._kept) + len(self._kept_pinned)

    # Admission

    def match(self, table: PageTable, num_tokens: int) -> Match:
        """Looks up the first `num_tokens` tokens of a sequence that has no pages."""
        return self._matcher.match(table, num_tokens)

    def fits(self, match: Match, num_pages: int, margin: int) -> bool:
        """Whether a table of `num_pages`, the match's among them, leaves `margin` pages."""
        return self.pool.num_available - (num_pages - match.num_in_use) >= margin

    def take(self, table: PageTable, match: Match, num_pages: int) -> None:
        """Gives a table without pages the match's pages and more, `num_pages` in all.

        `table.num_cached` tokens need not be computed, once `table.fetches` is empty; a move that
        fails until then makes them fewer.
        """
        for node in match.shared:
            self._share(table, node)
        fetched, partial = list(match.fetched), match.partial
        if partial is not None and partial.device is None:
            fetched.append(partial)
        fetches = self.mover.fetch(fetched, len(match.fetched))
        if partial is not None and partial.device is not None:
            self._share_part(table, partial, match.partial_tokens)
        self.forsake(table)
        table.pages += self._allocate(num_pages - len(table.pages), table.pages)
        table.num_cached = match.num_tokens
        self.mover.begin_fetches(fetches, table, len(match.shared))

    def extend(self, table: PageTable) -> bool:
        """Adds one page to a table; False when every page is in use."""
        if not self.pool.num_available:
            return False
        table.pages += self._allocate(1, table.pages)
        return True

    # What is known

    def num_known(self, table: PageTable) -> int:
        """Full pages of a table that the tree knows."""
        nodes = table.nodes
        return len(nodes) - (bool(nodes) and nodes[-1].num_tokens < self.pool.page_size)

    def known(self, table: PageTable, num_tokens: int) -> tuple[list[Node], int]:
        """Nodes with images of the first `num_tokens` tokens of a sequence, as far as there are
        any, and how many tokens those are."""
        return self._matcher.known(table, num_tokens)

    def cached(self) -> Iterator[list[Node]]:
        """Prefixes that lie on the device and that no sequence uses, each by its nodes; the one
        used last first."""
        for last in reversed((*self._kept, *self._kept_pinned)):
            if any(node.device is not None for node in last.children):
                continue  # It is part of a longer one.
            path, node = [], last
            while node.parent is not None:
                path.append(node)
                node = node.parent
            if all(node.device is not None for node in path):
                yield path[::-1]

    def written(self, table: PageTable, num_tokens: int, partial: bool = False) -> None:
        """Enters in the tree the full pages of a sequence's first `num_tokens` tokens; with
        `partial` also what of them the page after holds.

        The tokens must be known, and their KV written by steps already dispatched.
        """
        page_size = self.pool.page_size
        full = num_tokens // page_size
        for index in range(self.num_known(table), full):
            if not self._enter(table, index, (index + 1) * page_size):
                return
        if partial and num_tokens % page_size and self.num_known(table) == full:
            self._enter(table, full, num_tokens)

    def release(
        self, table: PageTable, num_tokens: int, *, pin: bool = False, keep: bool = True
    ) -> None:
        """Takes the pages of a sequence, the KV of whose first `num_tokens` tokens is written.

        `pin` holds what is known of them until the sequence takes pages again, or `forsake`.
        Without `keep` they are not worth a copy on a lower tier.
        """
        arriving = [node for fetch in table.fetches for node in fetch.nodes]
        self.mover.abandon_fetches(table, 0)
        self.written(table, num_tokens, partial=True)
        if pin:
            table.pinned = table.nodes + arriving
            for node in table.pinned:
                node.pins += 1
        # Tails go first, so that of all that is kept a prefix's head is given up last.
        for index in reversed(range(len(table.pages))):
            page, node = table.pages[index], None
            if index < len(table.nodes):
                node = table.nodes[index]
                node.keep = keep or node.pins > 0 or self.pool.refs(page) > 1
            self._let_go(page, node)
        table.clear()

    def forsake(self, table: PageTable) -> None:
        """Lets go of what a preempted sequence meant to come back to."""
        self.unpin(table.pinned)
        table.pinned = []

    def prefers_swap(self, table: PageTable, num_tokens: int) -> bool:
        """Whether a sequence about to lose its pages had better come back to them, on a lower
        tier, than compute its first `num_tokens` tokens again."""
        swap = bool(self.mover.shelves) and self._preemption != "recompute"
        # What is being fetched was found worth it.
        if swap and self._preemption == "auto" and not table.fetches:
            below = self.mover.shelves[0].tier
            num_pages = self.pool.pages_for(num_tokens)
            saved = sum(node.saved for node in table.nodes)
            out_bytes = self.mover.staged_bytes(max(0, num_pages - saved))
            back_bytes = self.mover.staged_bytes(num_pages)
            swap = self.rates.prefers_swap(
                0, num_tokens, [(Tier.DEVICE, below, out_bytes), (below, Tier.DEVICE, back_bytes)]
            )
        self.counters.swaps += swap
        self.counters.recomputes += not swap
        return swap

    def pin(self, nodes: Iterable[Node]) -> None:
        """Has these nodes given up only when nothing else can be."""
        for node in nodes:
            node.pins += 1
            self._file(node)

    def unpin(self, nodes: Sequence[Node]) -> None:
        """Takes back `pin`."""
        for node in reversed(nodes):
            node.pins -= 1
            self._file(node)

    def reset(self) -> None:
        """Forgets every prefix. Sequences keep the pages they have, and share them no more."""
        for node in self.tree.clear():
            self._file(node)

    def evict(self, count: int) -> int:
        """Frees up to `count` pages that no sequence uses, and says how many."""
        for done in range(count):
            order = self._kept or self._kept_pinned
            if not order:
                return done
            self._evict(next(iter(order)))
        return count

    # Moves

    def poll(self, now_us: int) -> list[Ticket]:
        """Takes in what has moved; call it before a step is planned. Returns the moves ended."""
        return self.mover.poll(now_us)

    def operations(self) -> Operations:
        """What must be done on the device before the step just planned."""
        copies, self._copies = self._copies, []
        freed, self._freed = self._freed, []
        copied = {target for _, target in copies}
        return Operations(
            loads=self.mover.take_loads(),
            saves=self.mover.take_saves(),
            copies=copies,
            freed=[page for page in freed if page not in copied],
        )

    def begin(self, save: Transfer, staging: Any) -> None:
        """Goes on with a save whose source pages were gathered into `staging`; None gives it up."""
        if staging is None:
            self.mover.refuse_save(save)
        else:
            self.mover.begin_save(save, staging)

    # Inside

    def _share(self, table: PageTable, node: Node) -> None:
        self.pool.share(node.device)
        node.keep = True
        self._file(node)
        table.pages.append(node.device)
        table.nodes.append(node)

    def _share_part(self, table: PageTable, node: Node, num_tokens: int) -> None:
        """Gives a table a page that begins with this node's first tokens, to write on after them:
        its very page where that harms nobody, else a copy."""
        if num_tokens == node.num_tokens < self.pool.page_size and not self._used(node):
            self._share(table, node)
            return
        # Should this very page be evicted for its copy, it is read before it is written.
        source = node.device
        table.pages += self._allocate(1, table.pages)
        self._copies.append((source, table.pages[-1]))
        self.counters.copied_pages += 1

    def _enter(self, table: PageTable, index: int, stop: int) -> bool:
        """Has the tree know page `index` of a table up to token `stop`; False if it cannot."""
        page_size = self.pool.page_size
        parent = table.nodes[index - 1] if index else self.tree.root(table.salt)
        own = table.nodes[index] if index < len(table.nodes) else None
        if not parent.attached or (own is not None and not own.attached):
            return False
        tokens = table.tokens(index * page_size, stop)
        if stop == (index + 1) * page_size:
            known = self.tree.full(parent, tokens, table.key(index, page_size))
        else:
            known, common = self.tree.closest(parent, tokens)
            if common == stop - index * page_size:
                return known is own  # As much is known already.
            known = None
        if known is None:
            self._enter_new(table, index, parent, own, tokens)
            return True
        if known.transfer is not None:
            return False
        if own is not None:
            table.nodes.pop()
        if known.device is None:
            if own is not None:
                own.device = None
                self._file(own)
            known.device = table.pages[index]
            table.nodes.append(known)
            self._file(known)
        else:  # Computed twice: one of the two will do.
            page = table.pages[index]
            self.pool.share(known.device)
            self._file(known)
            table.replace(index, known.device)
            table.nodes.append(known)
            self._let_go(page, own)
        return True

    def _enter_new(
        self, table: PageTable, index: int, parent: Node, own: Node | None, tokens: bytes
    ) -> None:
        if own is None:
            node = self.tree.add(parent, tokens)
            node.device = table.pages[index]
            table.nodes.append(node)
        else:
            self.tree.grow(own, tokens)

    def _let_go(self, page: int, node: Node | None) -> None:
        """Takes a reference from a page, and keeps it for its node if it has one."""
        if self.pool.drop(page):
            return
        if node is None:
            self._free(page)
        else:
            self._file(node)

    def _allocate(self, count: int, pages: Sequence[int]) -> list[int]:
        """Free pages that continue `pages`, at the cost of what is kept."""
        if count <= 0:
            return []
        self.evict(count - self.pool.num_free)
        return self.pool.allocate(count, pages[-1] if pages else None)

    def _evict(self, node: Node) -> None:
        page = node.device
        saved = node.saved or (node.keep and node.transfer is None and self.mover.save(node, page))
        self.counters.evicted_pages += 1
        self.counters.lost_pages += not saved
        self._free_device(node)
        self._file(node)

    def _free_device(self, node: Node) -> None:
        if node.device is not None:
            page, node.device = node.device, None
            self._free(page)

    def _free(self, page: int) -> None:
        self.pool.free(page)
        self._freed.append(page)

    def _used(self, node: Node) -> bool:
        return node.device is not None and self.pool.refs(node.device) > 0

    def _file(self, node: Node) -> None:
        """Puts a node where its state says: among those that may give way, or out of the tree."""
        order = None
        if node.device is not None and not self._used(node):
            if not node.attached or not (self._retain or node.pins):
                self._free_device(node)
            else:
                order = self._kept_pinned if node.pins else self._kept
        for other in (self._kept, self._kept_pinned):
            if other is not order:
                other.pop(node, None)
        if order is not None:
            order.setdefault(node)  # In its place if it has one: prefixes stay behind their tails.
        if not self._retain and not node.pins and node.device is None:
            self.mover.forget(node)
        self.mover.file(node)
        self.tree.prune(node)
