"""The page table of one sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxserve.kv.prefix_tree import Node, chain_key, pack_tokens, salt_key

if TYPE_CHECKING:
    from jaxserve.kv.transfers import Transfer

_TOKEN_BYTES = 4


class PageTable:
    """A sequence's pages in order, and what the prefix tree knows of them.

    `nodes[i]` says what lies on `pages[i]`, for as many of the first pages as the tree knows; only
    the last of them may know just part of its page. The sequence writes to no page before the first
    that is all its own.
    """

    __slots__ = (
        "_keys",
        "_packed",
        "_token_ids",
        "fetches",
        "nodes",
        "num_cached",
        "num_uploaded",
        "pages",
        "pinned",
        "salt",
    )

    def __init__(self, token_ids: Callable[[int, int], list[int]], salt: bytes) -> None:
        """`token_ids(start, stop)` gives the sequence's tokens at positions start .. stop - 1;
        sequences share pages with those of the same `salt` alone."""
        self.pages: list[int] = []
        self.nodes: list[Node] = []
        self.pinned: list[Node] = []
        """What it left behind and will come back to."""
        self.fetches: list[Transfer] = []
        """Moves into its pages that it waits for."""
        self.num_cached = 0
        """Tokens whose KV it was given when it last took its pages."""
        self.num_uploaded = 0
        """First pages that the device's copy of the table has, or is about to have."""
        self.salt = salt
        self._token_ids = token_ids
        self._packed = bytearray()
        self._keys = [salt_key(salt)]

    def replace(self, index: int, page: int) -> None:
        """Puts another page with the same contents in place of one."""
        self.pages[index] = page
        self.num_uploaded = min(self.num_uploaded, index)

    def clear(self) -> None:
        """Forgets its pages, which others may have from now on."""
        self.pages, self.nodes, self.num_cached, self.num_uploaded = [], [], 0, 0

    def take_changes(self) -> tuple[int, list[int]]:
        """The first index whose page the device's copy lacks, and the pages from there on; from
        now on they count as uploaded."""
        first, self.num_uploaded = self.num_uploaded, len(self.pages)
        return first, self.pages[first:]

    def tokens(self, start: int, stop: int) -> bytes:
        """The tokens at positions start .. stop - 1, packed. They must be known."""
        known = len(self._packed) // _TOKEN_BYTES
        if stop > known:
            self._packed += pack_tokens(self._token_ids(known, stop))
        return bytes(self._packed[start * _TOKEN_BYTES : stop * _TOKEN_BYTES])

    def key(self, index: int, page_size: int) -> bytes:
        """The hash of all tokens up to the end of page `index`, which must be known."""
        for page in range(len(self._keys) - 1, index + 1):
            tokens = self.tokens(page * page_size, (page + 1) * page_size)
            self._keys.append(chain_key(self._keys[page], tokens))
        return self._keys[index + 1]
