"""Pages in host memory for the older KV of sequences longer than the device's pool.

Such a sequence keeps its newest pages in the pool, a fixed number of them, and moves the oldest of
these to the host before it takes more (docs/decisions/017-kv-on-the-host.md). Its host pages are
reserved when it is admitted, all that it can ever need, so that no step lacks one. Layers with a
window give their older pages back, and have none on the host.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable

from jaxserve.core.arithmetic import cdiv
from jaxserve.kv.extents import ExtentAllocator
from jaxserve.kv.layout import KVLayout
from jaxserve.kv.pages import PageError


@dataclasses.dataclass(frozen=True)
class HostKV:
    """What sequences may take that hold more than `capacity` pages at a time, which is at most the
    pool's: in each KV group without a window `resident_pages` of the pool, the newest, and all
    together `num_pages` on the host. `layout` has the groups."""

    capacity: int
    resident_pages: int
    num_pages: int
    layout: KVLayout

    def on_host(self, num_tokens: int) -> int:
        """Pages of a sequence of so many tokens that are on the host in the end; 0 if it stays in
        the pool."""
        if self.layout.pages_for(num_tokens) <= self.capacity:
            return 0
        return self._beyond(num_tokens)

    def in_pool(self, num_tokens: int) -> int:
        """The most pages of the pool that a sequence of so many tokens holds at a time."""
        return self.layout.pages_for(num_tokens) - self.on_host(num_tokens)

    def resident(self, num_tokens: int) -> int:
        """As `in_pool`, of the first tokens of a longer sequence, whose older pages are on the
        host."""
        return self.layout.pages_for(num_tokens) - self._beyond(num_tokens)

    def longest(self, max_model_len: int | None = None) -> int:
        """The most tokens, up to `max_model_len` and rounded up to whole pages, of one sequence."""
        size, most = self.layout.page_size, self.capacity + self.num_pages
        pages = range(1, 1 + (most if max_model_len is None else cdiv(max_model_len, size)))
        return size * bisect_left(pages, self.num_pages + 1, key=lambda n: self.on_host(n * size))

    def _beyond(self, num_tokens: int) -> int:
        """Pages of full groups beyond those that stay in the pool."""
        pages = cdiv(num_tokens, self.layout.page_size)
        return self.layout.num_full * max(0, pages - self.resident_pages)


class HostPages:
    """Allocates the host pages `0 .. limits.num_pages - 1`."""

    def __init__(self, limits: HostKV) -> None:
        self.limits = limits
        self._extents = ExtentAllocator(0, limits.num_pages)
        self._taken = bytearray(limits.num_pages)

    @property
    def num_free(self) -> int:
        return self._extents.num_free

    @property
    def num_used(self) -> int:
        return self.limits.num_pages - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Allocates pages. Raises PageError, and allocates nothing, when fewer are free."""
        if count > self.num_free:
            raise PageError(f"{count} host pages requested, {self.num_free} free")
        pages = self._extents.allocate(count)
        for page in pages:
            self._taken[page] = 1
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """Frees pages. Raises PageError for one that is free already."""
        for page in pages:
            if not self._taken[page]:
                raise PageError(f"host page {page} is not taken")
            self._taken[page] = 0
            self._extents.free((page,))
