"""The pool of KV pages: which are free, which are in use.

Paged KV after vLLM (Kwon et al. 2023): every sequence owns a list of fixed-size pages instead of
one contiguous buffer, so at most `page_size - 1` slots of a sequence are ever wasted.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from jaxserve.errors import ConfigError, JaxserveError

TRASH_PAGE = 0


class PageError(JaxserveError):
    """An operation that would corrupt the pool: too few pages, a double free, a foreign page."""


class PagePool:
    """Hands out page numbers `1 .. num_pages - 1`; page 0 is the trash page.

    The trash page takes the writes of padding and belongs to nobody. Allocation is O(1) per page
    and deterministic: the page freed last is handed out first, and a fresh pool counts up from 1.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        """Raises ConfigError unless there is a usable page of at least one token."""
        if num_pages < 2:
            raise ConfigError(f"num_pages is {num_pages}; at least 2 are needed (one is trash)")
        if page_size < 1:
            raise ConfigError(f"page_size is {page_size} tokens; it must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, TRASH_PAGE, -1))
        self._in_use = bytearray(num_pages)

    @property
    def capacity(self) -> int:
        """Pages that can be in use at once."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.capacity - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages, in the order they will fill.

        Raises PageError when fewer are free, having taken none: look at `num_free` first.
        """
        if count > len(self._free):
            raise PageError(f"{count} pages asked for, {len(self._free)} free of {self.capacity}")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._in_use[page] = 1
        return pages

    def free(self, pages: SequenceOf[int]) -> None:
        """Gives pages back.

        Raises PageError, having changed nothing, when one of them is not in use or is named twice.
        """
        if len(set(pages)) != len(pages):
            raise PageError(f"a page is named twice in {list(pages)}")
        for page in pages:
            if not 0 <= page < self.num_pages or not self._in_use[page]:
                raise PageError(f"page {page} is not in use (pages are 1 .. {self.capacity})")
        for page in reversed(pages):
            self._in_use[page] = 0
            self._free.append(page)
