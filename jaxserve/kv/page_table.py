"""The page tables of one sequence."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.kv.prefix_cache.node import TOKEN_BYTES, Node
from jaxserve.kv.prefix_cache.prefix_tree import chain_key, pack_tokens, salt_key


class PageTable:
    """A sequence's pages in order, and their prefix tree nodes: of the first KV group, with those
    of the `others`.

    `nodes[i]` describes `pages[i]`, for the leading pages that are in the tree; only the last node
    may cover just part of its page. The sequence writes to no page before the first page that is
    private to it. The first `num_released` pages have left the group's window: TRASH_PAGE stands
    for them, and their nodes only say what comes before the others. A table longer than the pool
    has no nodes, and without a window its released pages are the first of `host_pages`.
    """

    __slots__ = (
        "_keys",
        "_packed",
        "_token_ids",
        "host_pages",
        "may_fetch",
        "nodes",
        "num_cached",
        "num_host_pages",
        "num_matched",
        "num_released",
        "num_uploaded",
        "others",
        "pages",
        "pinned",
        "salt",
    )

    def __init__(
        self,
        token_ids: Callable[[int, int], list[int]],
        salt: bytes,
        others: tuple[PageTable, ...] = (),
        num_host_pages: int = 0,
    ) -> None:
        """`token_ids(start, stop)` returns the sequence's tokens at positions start .. stop - 1.
        Only tables with the same `salt` share pages. `num_host_pages`: host pages that a sequence
        longer than the pool holds in this group while it runs."""
        self.others = others
        self.pages: list[int] = []
        self.nodes: list[Node] = []
        self.pinned: list[Node] = []
        """Nodes it pinned when it was preempted, until it resumes."""
        self.num_cached = 0
        """Tokens with cached KV when it last took its pages, less those whose transfer failed."""
        self.num_matched = 0
        """Tokens with cached KV when it last took its pages, for tables with a window."""
        self.num_released = 0
        self.num_host_pages = num_host_pages
        self.host_pages: list[int] = []
        """Those it holds, in order; it uses the first `num_released`."""
        self.may_fetch = True
        """Whether to try to fetch its KV from lower tiers: not again after a failure."""
        self.num_uploaded = 0
        """Number of leading pages that the device's copy of the table has, or is about to have."""
        self.salt = salt
        self._token_ids = token_ids
        self._packed = bytearray()
        self._keys = [salt_key(salt)]

    @property
    def tables(self) -> tuple[PageTable, ...]:
        """The tables of all KV groups, itself first."""
        return (self, *self.others)

    @property
    def needs_host_pages(self) -> int:
        """Host pages of all KV groups that the sequence holds while it runs."""
        return sum(own.num_host_pages for own in self.tables)

    @property
    def on_host(self) -> tuple[list[int], ...]:
        """The first pages of each KV group, where these are on the host; none without any there."""
        if not self.num_host_pages:
            return ()
        return tuple(own.host_pages[: own.num_released] for own in self.tables)

    @property
    def held(self) -> list[int]:
        """The pages that it still needs."""
        return self.pages[self.num_released :]

    def replace(self, index: int, page: int) -> None:
        """Replaces page `index` by a page with the same contents."""
        self.pages[index] = page
        self.num_uploaded = min(self.num_uploaded, index)

    def clear(self) -> None:
        """Drops all pages; they may be reused from now on."""
        self.pages, self.nodes, self.num_cached, self.num_uploaded = [], [], 0, 0
        self.num_released = self.num_matched = 0

    def upload(self) -> int:
        """Returns the number of leading pages uploaded so far, and marks all as uploaded."""
        num_uploaded, self.num_uploaded = self.num_uploaded, len(self.pages)
        return num_uploaded

    def tokens(self, start: int, stop: int) -> bytes:
        """The tokens at positions start .. stop - 1, packed. They must be known."""
        known = len(self._packed) // TOKEN_BYTES
        if stop > known:
            self._packed += pack_tokens(self._token_ids(known, stop))
        return bytes(self._packed[start * TOKEN_BYTES : stop * TOKEN_BYTES])

    def key(self, index: int, page_size: int) -> bytes:
        """The hash of all tokens up to the end of page `index`, which must be known."""
        for page in range(len(self._keys) - 1, index + 1):
            tokens = self.tokens(page * page_size, (page + 1) * page_size)
            self._keys.append(chain_key(self._keys[page], tokens))
        return self._keys[index + 1]
