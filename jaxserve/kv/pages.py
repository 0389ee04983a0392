"""The device's pool of KV pages: each page is free, in use or cached.

Paged KV after vLLM (Kwon et al. 2023): every sequence owns a list of fixed-size pages instead of
one contiguous buffer, so a sequence wastes at most `page_size - 1` tokens' worth of memory. Pages
are reference counted: sequences with a common prefix share its pages.
"""

from __future__ import annotations

from jaxserve.core.arithmetic import cdiv
from jaxserve.core.errors import ConfigError, JaxserveError
from jaxserve.kv.extents import ExtentAllocator

TRASH_PAGE = 0


class PageError(JaxserveError):
    """An operation that would corrupt the pool: too few pages, a double free, a foreign page."""


class PagePool:
    """Counts references to pages `1 .. num_pages - 1`; page 0 is the trash page.

    Writes of padding go to the trash page, which is never allocated. Any other page is free, in
    use (one reference or more) or cached (no reference, but the prefix tree has a node for its
    content).
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        """Raises ConfigError unless there is a usable page of at least one token."""
        if num_pages < 2:
            raise ConfigError(f"num_pages is {num_pages}; at least 2 are needed (one is trash)")
        if page_size < 1:
            raise ConfigError(f"page_size is {page_size} tokens; it must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_cached = 0
        self._extents = ExtentAllocator(TRASH_PAGE + 1, num_pages)
        self._refs = [0] * num_pages
        self._taken = bytearray(num_pages)

    @property
    def capacity(self) -> int:
        """Maximum number of pages in use at the same time."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return self._extents.num_free

    @property
    def num_available(self) -> int:
        """Pages that no sequence uses: free or cached."""
        return self._extents.num_free + self.num_cached

    @property
    def num_used(self) -> int:
        return self.capacity - self.num_available

    def refs(self, page: int) -> int:
        return self._refs[page]

    def pages_for(self, num_tokens: int) -> int:
        """Pages needed for `num_tokens` tokens of one sequence."""
        return cdiv(num_tokens, self.page_size)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Allocates `count` free pages with one reference each, in the order they will be filled;
        pages that follow `after` come first if they are free.

        Raises PageError, and allocates nothing, when fewer are free: check `num_free` first.
        """
        if count > self.num_free:
            raise PageError(f"{count} pages requested, {self.num_free} free of {self.capacity}")
        pages = self._extents.allocate(count, after)
        for page in pages:
            self._refs[page] = self._taken[page] = 1
        return pages

    def share(self, page: int) -> None:
        """Adds a reference to a page in use or cached. Raises PageError for any other page."""
        self._check_taken(page)
        self.num_cached -= not self._refs[page]
        self._refs[page] += 1

    def drop(self, page: int) -> int:
        """Drops a reference; a page without any stays cached until it is freed or shared.

        Returns the remaining references. Raises PageError when there was none.
        """
        self._check_taken(page)
        if not self._refs[page]:
            raise PageError(f"page {page} has no reference to drop")
        self._refs[page] -= 1
        self.num_cached += not self._refs[page]
        return self._refs[page]

    def free(self, page: int) -> None:
        """Frees a cached page. Raises PageError when it is in use or already free."""
        self._check_taken(page)
        if self._refs[page]:
            raise PageError(f"page {page} is in use, {self._refs[page]} times; it cannot be freed")
        self.num_cached -= 1
        self._taken[page] = 0
        self._extents.free((page,))

    def _check_taken(self, page: int) -> None:
        if not 0 < page < self.num_pages or not self._taken[page]:
            raise PageError(f"page {page} is not taken (pages are 1 .. {self.capacity})")
