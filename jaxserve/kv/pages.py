"""The pool of KV pages on the device: which are free, which are in use, which are kept.

Paged KV after vLLM (Kwon et al. 2023): every sequence owns a list of fixed-size pages instead of
one contiguous buffer, so at most `page_size - 1` tokens' worth of a sequence is ever wasted. Pages
are counted references: sequences that begin alike share the pages of their beginning.
"""

from __future__ import annotations

from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.kv.runs import RunAllocator

TRASH_PAGE = 0


class PageError(JaxserveError):
    """An operation that would corrupt the pool: too few pages, a double free, a foreign page."""


class PagePool:
    """Counts references to pages `1 .. num_pages - 1`; page 0 is the trash page.

    The trash page takes the writes of padding and belongs to nobody. Any other page is free, in
    use (one reference or more) or kept (none, but its content is remembered; the prefix tree knows
    for what).
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        """Raises ConfigError unless there is a usable page of at least one token."""
        if num_pages < 2:
            raise ConfigError(f"num_pages is {num_pages}; at least 2 are needed (one is trash)")
        if page_size < 1:
            raise ConfigError(f"page_size is {page_size} tokens; it must be at least 1")
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_kept = 0
        self._runs = RunAllocator(TRASH_PAGE + 1, num_pages)
        self._refs = [0] * num_pages
        self._taken = bytearray(num_pages)

    @property
    def capacity(self) -> int:
        """Pages that can be in use at once."""
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return self._runs.num_free

    @property
    def num_available(self) -> int:
        """Pages that are free or could be made so: those that no sequence uses."""
        return self._runs.num_free + self.num_kept

    @property
    def num_used(self) -> int:
        return self.capacity - self.num_available

    def refs(self, page: int) -> int:
        return self._refs[page]

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Takes `count` free pages, one reference each, in the order they will fill; those that
        follow `after` where they are free.

        Raises PageError when fewer are free, having taken none: look at `num_free` first.
        """
        if count > self.num_free:
            raise PageError(f"{count} pages asked for, {self.num_free} free of {self.capacity}")
        pages = self._runs.allocate(count, after)
        for page in pages:
            self._refs[page] = self._taken[page] = 1
        return pages

    def share(self, page: int) -> None:
        """Adds a reference to a page that is in use or kept. Raises PageError for another."""
        self._check_taken(page)
        self.num_kept -= not self._refs[page]
        self._refs[page] += 1

    def drop(self, page: int) -> int:
        """Takes a reference away; a page without any is kept until it is freed or shared.

        Returns how many are left. Raises PageError when there was none.
        """
        self._check_taken(page)
        if not self._refs[page]:
            raise PageError(f"page {page} has no reference to take away")
        self._refs[page] -= 1
        self.num_kept += not self._refs[page]
        return self._refs[page]

    def free(self, page: int) -> None:
        """Makes a kept page free. Raises PageError when it is in use, or free already."""
        self._check_taken(page)
        if self._refs[page]:
            raise PageError(f"page {page} is in use, {self._refs[page]} times, and cannot be freed")
        self.num_kept -= 1
        self._taken[page] = 0
        self._runs.free((page,))

    def _check_taken(self, page: int) -> None:
        if not 0 < page < self.num_pages or not self._taken[page]:
            raise PageError(f"page {page} is not taken (pages are 1 .. {self.capacity})")
