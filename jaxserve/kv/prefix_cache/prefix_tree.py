"""The prefix tree: an index of cached KV whose nodes are pages of tokens.

A node stands for up to one page of tokens after a given prefix, and records which pages hold its
KV. Full pages are found by a 128-bit hash of all tokens up to their end (the hash chain of vLLM's
prefix cache) and compared token by token; a partial page is found among its siblings by the longest
common prefix (as on the edges of a radix tree). The hash chain begins with a salt, so that
sequences with different salts share nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from hashlib import blake2b
from operator import attrgetter

import numpy as np

from jaxserve.kv.prefix_cache.node import TOKEN_BYTES, Node

_tokens = attrgetter("tokens")


def pack_tokens(token_ids: list[int]) -> bytes:
    """Packs token ids into bytes that sort as the ids do."""
    return np.asarray(token_ids, ">u4").tobytes()


def unpack_tokens(tokens: bytes) -> list[int]:
    """The inverse of `pack_tokens`."""
    return np.frombuffer(tokens, ">u4").tolist()


def salt_key(salt: bytes) -> bytes:
    """The 16-byte hash of the empty prefix of a salt."""
    return blake2b(salt, digest_size=16).digest()


def chain_key(parent_key: bytes, tokens: bytes) -> bytes:
    """The 16-byte hash of a page of tokens after the prefix with hash `parent_key`."""
    return blake2b(tokens, digest_size=16, key=parent_key).digest()


class PrefixTree:
    """The nodes of all salts. It changes what a node's tokens are and whether it is attached; the
    rest of a node is changed by `NodeStates`."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}
        self._full: dict[bytes, Node] = {}
        self._size = 0

    def __iter__(self) -> Iterator[Node]:
        """Every node except the roots, parents before children."""
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            yield from node.children
            pending += node.children

    def __len__(self) -> int:
        return self._size

    def root(self, salt: bytes) -> Node:
        """The root node of a salt; stored once it has a child."""
        return self._roots.get(salt) or Node(None, salt, salt_key(salt))

    def full(self, parent: Node, tokens: bytes, key: bytes) -> Node | None:
        """The child of `parent` that is exactly this full page, or None."""
        node = self._full.get(key)
        return node if node and node.parent is parent and node.tokens == tokens else None

    def closest(self, parent: Node, tokens: bytes) -> tuple[Node | None, int]:
        """The child with the longest common prefix with `tokens`, and that prefix's length.

        Siblings are sorted, so it is one of the two neighbours of the insertion point.
        """
        place = bisect_left(parent.children, tokens, key=_tokens)
        best, most = None, 0
        for node in parent.children[max(place - 1, 0) : place + 1]:
            common = _common_tokens(node.tokens, tokens)
            if common > most:
                best, most = node, common
        return best, most

    def add(self, parent: Node, tokens: bytes) -> Node:
        """Adds a child of `parent`; the caller has found no equivalent by `full` or `closest`."""
        node = Node(parent, tokens, chain_key(parent.key, tokens))
        self._insert(node)
        self._size += 1
        return node

    def grow(self, node: Node, tokens: bytes) -> None:
        """Extends a partial node to more tokens of its page."""
        self._take_out(node)
        node.tokens = tokens
        node.key = chain_key(node.parent.key, tokens)
        self._insert(node)

    def prune(self, node: Node) -> None:
        """Removes a node without KV and children, then its ancestors that have neither."""
        while node.parent is not None and node.attached and node.without_kv and not node.children:
            self._take_out(node)
            self._size -= 1
            node.attached = False
            node = node.parent
        if node.parent is None and not node.children and self._roots.get(node.tokens) is node:
            del self._roots[node.tokens]

    def clear(self) -> list[Node]:
        """Detaches every node and returns them."""
        nodes = list(self)
        for node in nodes:
            node.attached = False
        self._roots.clear()
        self._full.clear()
        self._size = 0
        return nodes

    def _insert(self, node: Node) -> None:
        parent = node.parent
        if parent.parent is None:
            self._roots[parent.tokens] = parent
        insort(parent.children, node, key=_tokens)
        if len(node.tokens) == self._page_bytes:
            self._full[node.key] = node

    def _take_out(self, node: Node) -> None:
        siblings = node.parent.children
        place = bisect_left(siblings, node.tokens, key=_tokens)
        while siblings[place] is not node:  # After a hash collision there may be duplicates.
            place += 1
        del siblings[place]
        if self._full.get(node.key) is node:
            del self._full[node.key]


def _common_tokens(a: bytes, b: bytes) -> int:
    """Length of the common prefix, in tokens."""
    size = min(len(a), len(b))
    differing = int.from_bytes(a[:size]) ^ int.from_bytes(b[:size])
    return (size - (differing.bit_length() + 7) // 8) // TOKEN_BYTES
