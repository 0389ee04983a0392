"""Shared prefixes of sequences: which member computes each, and how long its pages stay."""

from __future__ import annotations

from jaxserve.core.sequence import Sequence, SharedPrefix
from jaxserve.kv.manager import KVManager
from jaxserve.kv.page_table import PageTable
from jaxserve.kv.prefix_cache.prefix_tree import Node


class SharedPrefixes:
    """Changes the `prefixes` of sequences, and pins the pages of those that are ready."""

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._pinned: dict[SharedPrefix, list[Node]] = {}

    def join(self, seq: Sequence) -> None:
        """Counts a new sequence as a member of its prefixes."""
        for prefix in seq.prefixes:
            prefix.num_members += 1

    def keep_waiting(self, seq: Sequence) -> bool:
        """Whether a sequence must wait because another one is computing a prefix of it."""
        return any(prefix.keeps_waiting(seq) for prefix in seq.prefixes)

    def lead(self, seq: Sequence) -> None:
        """Makes an admitted sequence the leader of its prefixes that are not ready."""
        for prefix in seq.prefixes:
            if not prefix.ready:
                prefix.leader = seq

    def computed(self, seq: Sequence, table: PageTable) -> None:
        """Pins the prefixes that a leader has computed by now."""
        for prefix in seq.prefixes:
            if prefix.leader is seq and not prefix.ready and seq.num_written >= prefix.num_tokens:
                self._kv.cache_pages(table, seq.num_written, partial=True)
                prefix.ready = True
                nodes = self._kv.prefix_nodes(table, prefix.num_tokens)
                self._pinned[prefix] = nodes
                self._kv.pin(nodes)

    def leave(self, seq: Sequence) -> None:
        """Ends a finished sequence's membership; a prefix without members is unpinned."""
        for prefix in seq.prefixes:
            prefix.num_members -= 1
            if not prefix.num_members:
                self._kv.unpin(self._pinned.pop(prefix, []))
