"""What is known of each prefix: a tree whose nodes are pages of tokens.

A node stands for up to one page of tokens after a given prefix, and knows where images of its KV
lie. Full pages are found by a 128-bit hash of all tokens up to their end (the hash chain of vLLM's
prefix cache) and compared token by token; a page that is known in part is found among its siblings
by the longest common prefix (what a radix tree does at its edges). The chain begins with a salt, so
that those with different salts share nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from hashlib import blake2b
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxserve.kv.transfers import Transfer

_TOKEN_BYTES = 4
_tokens = attrgetter("tokens")


def pack_tokens(token_ids: list[int]) -> bytes:
    """Token ids as bytes, which compare as the ids do."""
    return np.asarray(token_ids, ">u4").tobytes()


def unpack_tokens(tokens: bytes) -> list[int]:
    """The token ids that `pack_tokens` made bytes of."""
    return np.frombuffer(tokens, ">u4").tolist()


def salt_key(salt: bytes) -> bytes:
    """The 16 bytes that name the empty prefix of a salt."""
    return blake2b(salt, digest_size=16).digest()


def chain_key(parent_key: bytes, tokens: bytes) -> bytes:
    """The 16 bytes that name a page of tokens after the prefix that `parent_key` names."""
    return blake2b(tokens, digest_size=16, key=parent_key).digest()


class Node:
    """Tokens after a prefix, and where their KV lies: a page number for each tier, or None.

    `tokens` are packed, at most a page of them (of a root, the salt); only a root and a full page
    have children. `pins` counts those who mean to come back to it. `transfer` is the move to the
    device or from it that it takes part in, if any; `passing` one that copies its image from a
    lower tier to the next. A node no longer `attached` is found by nobody, and its pages are freed
    by whoever uses them last.
    """

    __slots__ = (
        "attached",
        "children",
        "device",
        "disk",
        "host",
        "keep",
        "key",
        "parent",
        "passing",
        "pins",
        "tokens",
        "transfer",
    )

    def __init__(self, parent: Node | None, tokens: bytes, key: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.key = key
        self.children: list[Node] = []
        self.device: int | None = None
        self.host: int | None = None
        self.disk: int | None = None
        self.pins = 0
        self.transfer: Transfer | None = None
        self.passing: Transfer | None = None
        self.keep = True
        """Whether it is worth a copy in a lower tier when the device needs its page."""
        self.attached = True

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // _TOKEN_BYTES

    @property
    def moving(self) -> bool:
        """Whether a copier may read its images on lower tiers."""
        return self.transfer is not None or self.passing is not None

    @property
    def saved(self) -> bool:
        """Whether a lower tier has an image of it."""
        return self.host is not None or self.disk is not None

    @property
    def readable(self) -> bool:
        """Whether its image can be shared or fetched now."""
        return self.device is not None or (self.saved and self.transfer is None)

    @property
    def arriving(self) -> bool:
        """Whether its image will be readable soon."""
        return self.transfer is not None and self.transfer.awaited

    @property
    def homeless(self) -> bool:
        """Whether no image of it exists, or is on its way."""
        return self.device is None and not self.saved and self.transfer is None


class PrefixTree:
    """The nodes of every salt. Knows nothing of pools; the manager says what lies where."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._page_bytes = page_size * _TOKEN_BYTES
        self._roots: dict[bytes, Node] = {}
        self._full: dict[bytes, Node] = {}
        self._size = 0

    def __iter__(self) -> Iterator[Node]:
        """Every node that stands for tokens, parents before children."""
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            yield from node.children
            pending += node.children

    def __len__(self) -> int:
        return self._size

    def root(self, salt: bytes) -> Node:
        """The empty prefix of a salt; remembered once it has a child."""
        return self._roots.get(salt) or Node(None, salt, salt_key(salt))

    def full(self, parent: Node, tokens: bytes, key: bytes) -> Node | None:
        """The child of `parent` that is this full page."""
        node = self._full.get(key)
        return node if node and node.parent is parent and node.tokens == tokens else None

    def closest(self, parent: Node, tokens: bytes) -> tuple[Node | None, int]:
        """The child that begins most like `tokens`, and how many tokens they have in common.

        Among sorted siblings it is one of the two that `tokens` would stand between.
        """
        place = bisect_left(parent.children, tokens, key=_tokens)
        best, most = None, 0
        for node in parent.children[max(place - 1, 0) : place + 1]:
            common = _common_tokens(node.tokens, tokens)
            if common > most:
                best, most = node, common
        return best, most

    def add(self, parent: Node, tokens: bytes) -> Node:
        """A new child, for which `full` and `closest` found nothing that says as much."""
        node = Node(parent, tokens, chain_key(parent.key, tokens))
        self._insert(node)
        self._size += 1
        return node

    def grow(self, node: Node, tokens: bytes) -> None:
        """Lets a node that knew part of a page stand for more of it."""
        self._take_out(node)
        node.tokens = tokens
        node.key = chain_key(node.parent.key, tokens)
        self._insert(node)

    def prune(self, node: Node) -> None:
        """Takes out a node that has no image and no descendant, and what that leaves so."""
        while node.parent is not None and node.attached and node.homeless and not node.children:
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
        while siblings[place] is not node:  # Had its key met another's, it may have a twin.
            place += 1
        del siblings[place]
        if self._full.get(node.key) is node:
            del self._full[node.key]


def _common_tokens(a: bytes, b: bytes) -> int:
    """Tokens at the start of both."""
    size = min(len(a), len(b))
    differing = int.from_bytes(a[:size]) ^ int.from_bytes(b[:size])
    return (size - (differing.bit_length() + 7) // 8) // _TOKEN_BYTES
