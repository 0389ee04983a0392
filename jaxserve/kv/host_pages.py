"""Pages in host memory for the older KV of sequences longer than the device's pool.

Such a sequence keeps its newest pages in the pool, a fixed number of them, and moves the oldest of
these to the host before it takes more (docs/decisions/017-kv-on-the-host.md). Its host pages are
reserved when it is admitted, all that it can ever need, so that no step lacks one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxserve.kv.extents import ExtentAllocator
from jaxserve.kv.pages import PageError


@dataclasses.dataclass(frozen=True)
class HostKV:
    """What sequences with more than `capacity` pages may take, which is at most the pool's: each at
    most `resident_pages` of the pool, the newest, and all together `num_pages` on the host."""

    capacity: int
    resident_pages: int
    num_pages: int

    @property
    def longest(self) -> int:
        """The most pages that a sequence may have."""
        return max(self.capacity, self.resident_pages + self.num_pages)

    def on_host(self, pages: int) -> int:
        """Pages of a sequence of `pages` that are on the host in the end; 0 if it stays in the
        pool."""
        return pages - self.resident_pages if pages > self.capacity else 0


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
