"""Prefix matching where layers have attention windows: of a windowed group, a hit needs only the
pages of the window before its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxserve.core.settings.choices import Preemption
from jaxserve.kv.layout import KVLayout
from jaxserve.kv.match import GroupMatch, Match, PrefixMatcher
from jaxserve.kv.offload.rates import OffloadRates
from jaxserve.kv.page_table import PageTable
from jaxserve.kv.pages import PagePool
from jaxserve.kv.prefix_cache.node import Node
from jaxserve.kv.prefix_cache.prefix_tree import PrefixTree


class GroupMatcher(PrefixMatcher):
    """Matches token sequences against the prefix tree, in whole pages of every KV group."""

    def __init__(
        self,
        tree: PrefixTree,
        pool: PagePool,
        rates: OffloadRates,
        page_bytes: int,
        preemption: Preemption,
        layout: KVLayout,
    ) -> None:
        super().__init__(tree, pool, rates, page_bytes, preemption)
        self._layout = layout

    def match(self, table: PageTable, num_tokens: int) -> Match:
        """Matches the first `num_tokens` tokens of a sequence: as many full pages as every group
        has what it needs of."""
        # Their nodes, whether or not any tier has their KV.
        paths = [self._full_pages(own, num_tokens, lambda node: True)[0] for own in table.tables]
        most = min(map(len, paths))
        readable = self._longest(paths, most, lambda node: node.readable)
        if self._longest(paths, most, lambda node: node.readable or node.arriving) > readable:
            return Match(arriving=True)
        match = self._match(paths, readable)
        if match.fetched and not (table.may_fetch and self._pays(match)):
            on_device = self._longest(paths, readable, lambda node: node.device is not None)
            match = self._match(paths, on_device)
        return match

    def _longest(
        self, paths: Sequence[list[Node]], most: int, usable: Callable[[Node], bool]
    ) -> int:
        """The most pages, at most `most`, such that every group can use what a token after them
        reads."""
        page_size, fit = self._layout.page_size, set(range(most + 1))
        for group, path in zip(self._layout.groups, paths):
            run = 0
            for count, node in enumerate(path[:most], 1):
                run = run + 1 if usable(node) else 0
                if run < count - group.first_page(count * page_size, page_size):
                    fit.discard(count)
        return max(fit)

    def _match(self, paths: Sequence[list[Node]], count: int) -> Match:
        page_size, groups = self._layout.page_size, []
        for group, path in zip(self._layout.groups, paths):
            first = group.first_page(count * page_size, page_size)
            away = (i for i in range(first, count) if path[i].device is None)
            groups.append(GroupMatch(path[:count], first, next(away, count) - first))
        shared = [node for group in groups for node in group.shared]
        return Match(
            shared=tuple(shared),
            fetched=tuple(node for group in groups for node in group.fetched),
            num_tokens=count * page_size,
            num_in_use=sum(self._pool.refs(node.device) > 0 for node in shared),
            groups=tuple(groups),
        )

    def _pays(self, match: Match) -> bool:
        """Whether to fetch what is not on the device. Device pages after lower-tier pages are
        rare, and not worth it."""
        if any(node.device is not None for node in match.fetched):
            return False
        return self._prefers_fetch(match.fetched, 0, match.num_tokens)
