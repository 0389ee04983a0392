"""Prefix insertion: a sequence's pages become nodes of the prefix tree, where others find them."""

from __future__ import annotations

from jaxserve.kv.page_table import PageTable
from jaxserve.kv.prefix_cache.node import Node, NodeState
from jaxserve.kv.prefix_cache.node_states import NodeStates
from jaxserve.kv.prefix_cache.prefix_tree import PrefixTree


class PrefixInserter:
    """Inserts pages of page tables, which hold the nodes from then on."""

    def __init__(self, tree: PrefixTree, states: NodeStates) -> None:
        self._tree = tree
        self._states = states

    def insert(self, table: PageTable, num_tokens: int, partial: bool) -> None:
        """Inserts the full pages of a sequence's first `num_tokens` tokens, of every KV group, up
        to the first that cannot be; with `partial` also the partly filled page after them."""
        full, rest = divmod(num_tokens, self._tree.page_size)
        for own in table.tables:
            index = self._num_full(own)
            while index < full and self._enter(own, index, (index + 1) * self._tree.page_size):
                index += 1
            if partial and rest and index == full:
                self._enter(own, full, num_tokens)

    def _num_full(self, table: PageTable) -> int:
        """Full pages of a table that are in the tree."""
        nodes = table.nodes
        return len(nodes) - (bool(nodes) and nodes[-1].num_tokens < self._tree.page_size)

    def _enter(self, table: PageTable, index: int, stop: int) -> bool:
        """Inserts page `index` of a table, up to token `stop`; False if that is not possible."""
        page_size = self._tree.page_size
        if index < table.num_released:
            return False
        parent = table.nodes[index - 1] if index else self._tree.root(table.salt)
        own = table.nodes[index] if index < len(table.nodes) else None
        if not parent.attached or (own is not None and not own.attached):
            return False
        tokens = table.tokens(index * page_size, stop)
        if stop == (index + 1) * page_size:
            known = self._tree.full(parent, tokens, table.key(index, page_size))
        else:
            known, common = self._tree.closest(parent, tokens)
            if common == stop - index * page_size:
                return known is own  # Already in the tree.
            known = None
        if known is None:
            self._enter_new(table, index, parent, own, tokens)
            return True
        if known.in_transfer:
            return False
        if own is not None:
            table.nodes.pop()
        if known.device is None:
            if own is not None:
                self._states.transition(own, NodeState.ABSENT)
            self._states.transition(known, NodeState.IN_USE, table.pages[index])
            table.nodes.append(known)
        else:  # Computed twice: drop the duplicate page.
            page = table.pages[index]
            self._states.use(known)
            table.replace(index, known.device)
            table.nodes.append(known)
            self._states.release(page, own)
        return True

    def _enter_new(
        self, table: PageTable, index: int, parent: Node, own: Node | None, tokens: bytes
    ) -> None:
        if own is None:
            node = self._tree.add(parent, tokens)
            self._states.transition(node, NodeState.IN_USE, table.pages[index])
            table.nodes.append(node)
        else:
            self._tree.grow(own, tokens)
